"""Hangs of 2 ranks in collectives of torch on GPUs: does the deadline name the rank that keeps the other waiting?

python tests/gpu/hangs.py MPIRUN [COUNT [AT_ONCE]]     as many hangs; prints a line for each, and fails if one is missed
mpirun -n 2 python tests/gpu/hangs.py KIND RANK SEED   one of them

Two ranks may share a GPU with NCCL 2.30.3 or later: NCCL_MULTI_RANK_GPU_ENABLE=1. Without a GPU, gloo stands in for
NCCL, and a thread for its RAS.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import torch

NAMED = ("sleep", "off", "busy", "stop", "kill", "subgroup", "other")  # off: without NCCL's RAS
EQUAL = ("p2p", "sizes", "compute")  # all ranks have launched as many collectives: nobody is named
# No hangs: the verbs have groups of their own, of which one rank has launched more at any time; a rank is late for a
# collective that the other has done, as the root of a broadcast.
MOVES = ("verbs", "late")
LIMIT = 16.0  # seconds of torch's groups, of which hpcdist takes a quarter less
LATE = 5.0 if torch.cuda.is_available() else 100.0  # seconds after that in which the rank is to be named
OPERATIONS = ("all_reduce", "broadcast", "all_gather_into_tensor")
NAMES = dict(zip(OPERATIONS, ("AllReduce", "Broadcast", "AllGather"), strict=True))  # as RAS has them


# One rank.


def watch_of(world):
    return world._stop._watch


def stand_in(world, launched, kind):
    """Let gloo's calls on the CPU be taken for NCCL's, and answer in place of RAS what the ranks write to files."""
    from hpcdist.tensors import accelerator
    from hpcdist.watch import torch_groups

    torch_groups._limit = lambda backend: 0.75 * LIMIT
    accelerator.KIND, accelerator.idle = "cpu", lambda device: kind == "late"
    folder, port = Path(os.environ["RAS_FOLDER"]), int(os.environ["NCCL_RAS_ADDR"].rpartition(":")[2])

    def ranks():
        found = [json.loads((folder / f"{rank}").read_text()) for rank in range(world.world_size)]
        state = lambda pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: E731
        gone = [rank for rank in found if not Path(f"/proc/{rank['pid']}").exists() or state(rank["pid"]) in "TZ"]
        return {"ranks": [rank for rank in found if rank not in gone], "missing_ranks": gone}

    def answer(listener):
        while True:
            with listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"OK\n" + json.dumps({"communicators": [ranks()]}).encode())

    def write():
        facts = {"host": "192.0.2.2", "pid": os.getpid(), "collective_counts": launched}
        (folder / f"{world.rank}.new").write_text(json.dumps(facts))
        (folder / f"{world.rank}.new").rename(folder / f"{world.rank}")

    write()
    if world.rank == int(os.environ["RAS_RANK"]):
        listener = socket.create_server(("localhost", port))
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    watch_of(world).follow(world.device, None if "NCCL_RAS_ENABLE" in os.environ else ("localhost", port))
    return write


def rank(kind, bad, seed):
    """Some collectives, and then the hang."""
    import torch.distributed as dist

    import hpcdist as hd

    gpu, chance = torch.cuda.is_available(), random.Random(seed)
    world = hd.init() if gpu else hd.init(backend="gloo", device="cpu")
    synchronize, device = torch.cuda.synchronize if gpu else lambda: None, world.device
    launched = dict.fromkeys(NAMES.values(), 0)
    write = (lambda: None) if gpu else stand_in(world, launched, kind)
    part = dist.new_group([0, 1])

    def launch(name, group=None, numel=1024, later=False):
        x, y = torch.ones(numel, device=device), torch.empty(2 * numel, device=device)
        launched[NAMES[name]] += 1
        write()
        arguments = {"all_reduce": (x,), "broadcast": (x, 0), "all_gather_into_tensor": (y, x)}[name]
        return getattr(dist, name)(*arguments, group=group, async_op=later)

    for group in (None, part):
        for _ in range(chance.randint(1, 4)):
            launch(chance.choice(OPERATIONS), group)
    synchronize()
    for group in (dist.group.WORLD, part):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT if gpu else 1000), group)
    watch = watch_of(world)
    watch._limit = LIMIT / 4  # it looks more often
    watch._look_now()
    world.comm.Barrier()
    mine = world.rank == bad
    os.write(1, f"hang {time.time()} rank {world.rank}\n".encode())
    last = chance.choice(OPERATIONS)
    if kind == "sizes":
        launch("all_reduce", numel=2**14 if mine else 2**20, later=not gpu)
    elif kind == "compute":
        if mine and gpu:
            torch.cuda._sleep(2**38)
        launch("all_reduce", later=not gpu)
    elif kind == "p2p":
        recv = dist.P2POp(dist.irecv, torch.empty(9, device=device), bad)
        [work.wait() for work in ([] if mine else dist.batch_isend_irecv([recv]))]
    elif kind == "verbs":
        launched["AllReduce"] += not mine
        write()
        for _ in range(int(LIMIT * 10)):
            hd.concat(torch.ones(3000, device=device))
            time.sleep(0.1)
        os.write(1, b"moves\n")
    elif kind == "late":
        launched["Broadcast"] += not mine
        write()
        time.sleep(1.5 * LIMIT)
        os.write(1, b"moves\n")
    elif kind == "other":
        launch("all_gather_into_tensor" if mine else "all_reduce", later=not gpu)
    elif not mine:
        launch(last, part if kind == "subgroup" else None)
    elif kind in ("stop", "kill"):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    elif kind == "busy":
        while True:
            pass
    if mine and kind in ("sleep", "off", "subgroup", "p2p"):
        time.sleep(1000)
    synchronize()
    time.sleep(0 if gpu else 1000)
    os.write(1, b"survived\n")


# All of them.


def free_port():
    """A port that nobody has now, and that the system gives to nobody who asks for any."""
    while True:
        with suppress(OSError), socket.create_server(("localhost", random.randrange(10000, 32000))) as listener:
            return listener.getsockname()[1]


def stacks(job):
    """Let the ranks of a job print where they are: it ends them."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "python" in process.name():
                process.send_signal(signal.SIGABRT)


def end_job(job, show):
    """End a job; with `show`, its ranks first print where they are."""
    for last in (*[lambda: stacks(job)] * show, job.terminate, lambda: os.killpg(job.pid, signal.SIGKILL)):
        try:
            last()
            job.wait(5)
            return
        except (subprocess.TimeoutExpired, ProcessLookupError):  # mpirun ends its ranks when it is asked to
            continue


def one(mpirun, number, kind):
    """Run a hang; return whether its rank is named, how many seconds after the deadline, and what was printed."""
    chance = random.Random(number)
    bad = chance.randrange(2)
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "PYTHONFAULTHANDLER": "1",
            "NCCL_RAS_ADDR": f"localhost:{free_port()}",
            "RAS_FOLDER": folder,
            "RAS_RANK": str(1 - bad),
        }
        environ |= {"NCCL_RAS_ENABLE": "0"} if kind == "off" else {}
        command = [mpirun, "-n", "2", sys.executable, __file__, kind, str(bad), str(number)]
        log = Path(folder, "log")
        with log.open("w") as out:
            how = {"env": {**os.environ, **environ}, "start_new_session": True}
            job = subprocess.Popen(command, stdout=out, stderr=out, **how)
        begin, seen, end = 0.0, 0.0, time.time() + 60 + 2 * LATE
        wanted = rf"rank {bad} \(.*(has not reached|is stopped|is dead)"
        if kind == "kill":  # a launcher may be faster
            wanted = rf"{wanted}|process rank {bad} with PID|PID \d+ RUNNING AT"
        wanted = "as many collectives" if kind in EQUAL else "moves" if kind in MOVES else wanted
        while job.poll() is None and time.time() < end:
            time.sleep(0.2)
            text = log.read_text(errors="replace")
            started = re.search(r"^hang (\S+)", text, re.MULTILINE)
            begin = float(started[1]) if started else 0.0
            if not seen and re.search(wanted, text):
                seen = time.time()
                end = seen + (20 if kind in NAMED else 0)  # torch's own deadline ends the job, some time
        end_job(job, show=not seen and job.poll() is None)
        lines = log.read_text(errors="replace").splitlines(keepends=True)
    wrong = "HangError" if kind in MOVES else rf"rank {1 - bad} \(.*has not reached"
    seen = seen or time.time() * any(re.search(wanted, line) for line in lines)
    named = bool(seen) and (kind == "other" or not any(re.search(wrong, line) for line in lines))
    return named, seen - begin - 0.75 * LIMIT, lines


def main(mpirun, count=20, at_once=8):
    kinds = [NAMED[number % len(NAMED)] for number in range(count)] + [*MOVES, *EQUAL[: count // 4]]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda number: one(mpirun, number, kinds[number]), range(len(kinds))))
    right = 0
    for number, (kind, (named, late, lines)) in enumerate(zip(kinds, found, strict=True)):
        good = named and (late < LATE or kind in MOVES)
        right += good
        print(f"hang {number} {kind}: {'right' if good else 'WRONG'}, {late:+.1f} s", flush=True)
        if not good or number < 1:
            print("".join(lines[-60:]), flush=True)
    print(f"{right} of {len(kinds)} hangs: right rank, or counts that are equal, within the deadline + {LATE:g} s")
    sys.exit(right < len(kinds))


if __name__ == "__main__":
    if sys.argv[1] in NAMED + EQUAL + MOVES:
        rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
