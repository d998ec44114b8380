"""``python -m hpcdist.run``: programs that are written for torchrun, as they are."""

import json
import re
import sys
import textwrap

import pytest
from launch import commands, finished, limit, mpirun, run

RUN = ("-m", "hpcdist.run")
SAY = """
    import json, os, sys
    import torch, torch.distributed as dist
    def say(*what): os.write(1, (json.dumps(what) + "\\n").encode())  # one write a line: the ranks' lines do not mix
"""
NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"),
]


def write(folder, body, name="program.py"):
    (folder / name).write_text(textwrap.dedent(SAY) + textwrap.dedent(body))
    return name


def job(np, folder, body, *options, **env):
    return mpirun(np, *RUN, *options, write(folder, body), "--epochs", "3", "--mpi", cwd=folder, env=env)


def lines(done):
    assert done.status == 0, done.err
    return sorted(json.loads(line) for line in done.out.splitlines())


@pytest.mark.parametrize("np", [0, 2])
def test_a_program_runs_as_it_is(np, tmp_path):
    """As python runs it: its arguments, folder and __main__; and its groups by env://, again after destroy. A store
    listens at the address. Processes that it forks may end as they like, and make a group; the job is their parent's. A
    variable that is empty is none."""
    (tmp_path / "beside.py").write_text("x = 5")
    body = """
    import beside, pickle
    class Own: pass
    assert type(pickle.loads(pickle.dumps(Own()))) is Own and __name__ == "__main__"
    assert (sys.argv, __file__) == (["program.py", "--epochs", "3", "--mpi"], os.path.abspath("program.py"))
    assert sys.path[0] == os.path.dirname(__file__) and "args" not in globals()
    assert torch.get_num_threads() == 2 and "TORCHELASTIC_RUN_ID" in os.environ
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(os.environ["RANK"], "x")
    assert all(store.get(str(other)) == b"x" for other in range(size))
    for backend in ("gloo", "mpi", None, "cpu:gloo"):
        dist.init_process_group(backend)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group())
        dist.destroy_process_group()
        say(backend or "", int(x), rank)
    import hpcdist as hd
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == size << 8
    else:
        try: hd.init()
        except hd.LaunchError as error: assert error.codes == ["HD104"]
        dist.init_process_group("gloo")
        dist.all_reduce(x := torch.ones(1))
        sys.exit(int(x))
    from mpi4py import MPI
    if not MPI.Is_initialized(): MPI.Init()
    assert MPI.COMM_WORLD.allreduce(1) == size
    dist.init_process_group("gloo")
    with hd.init() as world:
        assert hd.concat(torch.tensor(world.rank)).tolist() == list(range(size))
    dist.barrier(dist.new_group(list(range(size))))
    """
    done, size = job(np, tmp_path, body, OMP_NUM_THREADS="2", RANK=""), max(np, 1)
    assert lines(done) == sorted([b, size, rank] for b in ("gloo", "mpi", "", "cpu:gloo") for rank in range(size))


def test_the_variables_are_those_of_torchrun(tmp_path):
    body = f"say([os.environ.get(name) for name in {NAMES!r}])"
    found = lines(mpirun(2, *RUN, write(tmp_path, body), cwd=tmp_path, env={"OMP_NUM_THREADS": ""}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    expected = lines(run(["env", "--unset=OMP_NUM_THREADS", *command], cwd=tmp_path))
    address = NAMES.index("MASTER_ADDR")
    for (values,) in [*found, *expected]:
        values[address] = values[address] and "some"
    assert found == expected


def test_a_program_that_starts_mpi_is_refused(tmp_path):
    """In one line, also where one rank alone does and the other one waits for it."""
    body = """
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank: MPI.Init_thread()
    MPI.COMM_WORLD.Barrier()
    """
    done = job(2, tmp_path, body)
    assert done.status == 2, done
    assert done.err.count("MPI runs already; leave this call out") == 1, done.err
    assert re.search(r"^hpcdist run: error: MPI.Init\(\) at .*program.py:9: .*HD112", done.err, re.MULTILINE), done.err


@pytest.mark.parametrize(
    ("body", "status", "printed"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("raise SystemExit(5)", 5, ""),
        ("os.kill(os.getpid(), 2)", 130, "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_fails_ends_the_job(body, status, printed, tmp_path):
    """With its status; its own traceback is printed once, and no frame of hpcdist's."""
    done = job(
        2,
        tmp_path,
        f"""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank(): {body}
    dist.all_reduce(torch.ones(1))
    """,
    )
    assert done.status == status, done
    assert done.err.count(printed) == 1 or not printed, done.err
    assert "hpcdist/run" not in done.err and "runpy" not in done.err, done.err
    if printed.startswith("KeyE"):
        assert re.search(r"^\[rank1\]: +File .*program.py", done.err, re.MULTILINE), done.err


def test_an_interface_that_gloo_cannot_find_is_named(tmp_path):
    """As NCCL's variable may have it, but not gloo's; without that variable the program would run."""
    done = job(2, tmp_path, 'dist.init_process_group("gloo")', GLOO_SOCKET_IFNAME="^lo,docker")
    assert done.status == 1
    found = r"LaunchError: GLOO_SOCKET_IFNAME=\^lo,docker: \S+ has no such interface with an address, only .*\[HD114\]"
    assert re.search(found, done.err), done.err


@pytest.mark.parametrize("before", ["", 'dist.init_process_group("mpi")'])
def test_a_rank_that_does_not_reach_a_group_is_named(before, tmp_path):
    body = f"""
    import time
    {before}
    if os.environ["RANK"] == "1": time.sleep(600)
    dist.barrier() if dist.is_initialized() else dist.init_process_group("gloo")
    """
    done = job(2, tmp_path, body, **limit(3))
    assert done.status == 1
    assert re.search(r"rank 1 \(.*\) has not reached this call: it is in Python, at program.py", done.err), done.err


def test_what_is_no_program_is_refused(tmp_path):
    """In one line, with a code and status 2. So are variables that contradict MPI, and worlds of one under torchrun."""
    (tmp_path / "script.sh").write_text("if [ 1 ]; then srun python train.py; fi\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "rank-1.txt").mkdir(parents=True)
    write(tmp_path, "")
    for name, text in {"bad": "x = 1\nraise KeyError(5)", "wrong": "if", "hollow": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    cases = {
        ("absent.py",): "there is no file 'absent.py', from .* .HD401.",
        (".",): "there is no file '.', .* .HD401.",
        ("script.sh",): "script.sh is not a program in Python: .*HD402.",
        ("binary",): "binary is not a program in Python: .*HD402.",
        ("-m", "absent"): "no module absent .*HD401.",
        ("",): "there is no file ''.*HD401.",
        ("-m", ""): "no module  that can run.*HD401.",
        ("-m", "json"): "no module json that can run.*HD401.",
        ("-m", "hollow.b"): "no module hollow.b that can run.*HD401.",
        ("-m", "a..b"): "module a..b cannot be found: No module named 'a' .HD401.",
        ("-m", "program.py"): "module program.py cannot be found: .*HD401.",
        ("-m", ".x"): "module .x cannot be imported: ImportError: .*HD402.",
        ("-m", "bad"): "module bad cannot be imported: KeyError: 5, at .*bad/__init__.py:2 .HD402.",
        ("-m", "bad.mod"): "module bad.mod cannot be imported: KeyError: 5, at .*bad/__init__.py:2 .HD402.",
        ("-m", "wrong.mod"): "module wrong.mod cannot be imported: SyntaxError: .*__init__.py, line 1.*HD402.",
        ("torchrun", "program.py"): "torchrun would start processes .*HD106.",
        ("/usr/bin/python3.11", "program.py"): "would start processes .*HD106.",
        ("bin/accelerate", "launch", "program.py"): "would start processes .*HD106.",
        ("bin/accelerate-launch", "program.py"): "would start processes .*HD106.",
        ("-m", "accelerate.commands.launch", "program.py"): "would start processes .*HD106.",
        ("deepspeed", "program.py"): "would start processes .*HD106.",
        ("-m", "deepspeed.launcher.runner", "program.py"): "would start processes .*HD106.",
        ("-m", "torch.distributed.run", "program.py"): "would start processes .*HD106.",
        ("--rank-output", "file", "program.py"): "--rank-output file: .*HD410.",
        ("--rank-output", "taken", "program.py"): "--rank-output taken: Is a directory .HD410.",  # for rank 1 alone
        ("--nproc-per-node", "2", "program.py"): "unrecognized arguments: --nproc-per-node: omit torchrun's options: ",
        ("--no-such",): "required: SCRIPT .see",
        (): "required: SCRIPT .see",
    }
    contradictions = {  # variables that are not MPI's, or differ between the ranks
        "RANK=7": "RANK=7, but MPI says .*: unset RANK .HD106.",
        "NODE_RANK=7": "NODE_RANK=7, but MPI says 0: unset NODE_RANK .HD106.",
        "LOCAL_WORLD_SIZE=7": "LOCAL_WORLD_SIZE=7, but MPI says .*: unset LOCAL_WORLD_SIZE .HD106.",
        "MASTER_PORT=2950{rank}": "MASTER_PORT=29501, but rank 0 has 29500: unset MASTER_PORT .HD106.",
    }
    lines = {("hpcdist.run", *case): text for case, text in cases.items()}
    lines |= {(name, "hpcdist.run", "program.py"): text for name, text in contradictions.items()}
    for line, done in zip(lines, commands(2, *lines, cwd=tmp_path), strict=True):
        assert done.status == 2, (line, done)
        assert re.fullmatch(rf"hpcdist run: error: .*{lines[line]}.*\n", done.err), (line, done)
    torchrun = ("WORLD_SIZE=2", "RANK=0", "LOCAL_RANK=0", "hpcdist.run", "program.py")
    (done,) = commands(0, torchrun, cwd=tmp_path)
    assert done.status != 0 and "started 2 processes, without MPI" in done.err, done


def test_the_options(tmp_path):
    """--mpi replaces gloo alone; lines are tagged, or go to one file per rank, to which another run adds. A module has
    workers. The user's address is kept: a group needs neither it nor the port."""
    body = """
    from torch.utils.data import DataLoader
    if __name__ == "__main__":
        dist.init_process_group("gloo")
        print(dist.get_backend(), dist.get_backend(dist.new_group(backend="gloo")))
        print("wor", end="", flush=True)
        print("se", file=sys.stderr)
        print("ds", os.environ["MASTER_PORT"], torch.get_num_threads(), sys.argv[1], sys.path[0] == os.getcwd())
        for how in ("fork", "spawn"):
            loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context=how)
            print(how, [batch.tolist() for batch in loader])
        dist.barrier()
    """
    (tmp_path / "package").mkdir()
    write(tmp_path, body, "package/train.py")
    words, env = ("-m", "package.train", "--x"), {"MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    said = ["words 1 1 --x True", *(f"{how} [[0, 1], [2, 3]]" for how in ("fork", "spawn"))]
    done = finished(2, *RUN, "--mpi", "--tag-output", "--bind", "numa", *words, cwd=tmp_path, env=env)
    expected = [f"[{rank}] {line}" for rank in range(2) for line in ("mpi mpi", *said)]
    assert sorted(done.out.splitlines()) == sorted(expected)
    assert sorted(line for line in done.err.splitlines() if "se" in line) == ["[0] se", "[1] se"]
    (tmp_path / "logs" / "1").mkdir(parents=True)
    files = [tmp_path / "logs" / "1" / f"rank-{rank}.txt" for rank in range(2)]
    files[0].write_text("of another run\n")
    done = mpirun(2, *RUN, "--rank-output", "logs/1", *words, cwd=tmp_path, env=env)
    assert (done.status, done.out) == (0, ""), done
    for file in files:
        written = file.read_text()
        assert written.count("gloo gloo") == 1 and written.count("se\n") == 1, written
    assert files[0].read_text().startswith("of another run\n")
