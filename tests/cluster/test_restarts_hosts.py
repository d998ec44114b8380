"""A training that goes on after a fault, under Slurm, on three hosts of which it needs two."""

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Hosts
from launch import slowness
from slurm import Slurm

from hpcdist.tools.jobscript import Shape, write

pytestmark = pytest.mark.cluster

BIN = Path(sys.executable).parent
FAULTY = 2  # the first rank of the second node
STEPS, SAVED, AT = 30, 10, 17  # a checkpoint after every tenth step; the fault in step 17

TRAIN = """
import json, os, signal, sys, time
import torch, torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
import hpcdist as hd
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

fault, run = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with hd.init() as world:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model.state_dict(), "step": torch.tensor(0)}
    if os.path.exists("model.h5"):
        dcp.load(state, storage_reader=HDF5Reader("model.h5"))
    first = int(state["step"])
    while (step := int(state["step"])) < STEPS:
        if step == AT and world.rank == FAULTY and (run == 0 or fault == "bug"):
            with open("fault.part", "w") as file:
                json.dump({"time": time.time(), "host": os.uname().nodename}, file)
            os.rename("fault.part", "fault")
            match fault:
                case "kill": os.kill(os.getpid(), signal.SIGKILL)
                case "stop": os.kill(os.getpid(), signal.SIGSTOP)
                case "raise" | "bug": raise ValueError(f"a mistake in step {step}")
                case "power" | "wire": time.sleep(2)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * world.world_size + world.rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        state["step"] += 1
        if step == first and world.rank == 0:
            os.write(1, f"first step {step} of run {run} on {world.nodes} nodes at {time.time()}\\n".encode())
        if state["step"] % SAVED == 0 and fault != "never":
            dcp.save(state, storage_writer=HDF5Writer("model.h5"))
    if world.rank == 0:
        os.write(1, f"weights {[p.tolist() for p in model.parameters()]}\\n".encode())
"""


@dataclass
class Went:
    """How a job ended, the first steps of its runs, its weights, and seconds from the fault to the next run's step."""

    ended: object
    firsts: list
    weights: list
    seconds: float


def train(fault, restarts=3, options=(), env=None):
    """Train with a fault, on hosts and a Slurm of its own."""
    with Hosts(3) as hosts, Slurm(hosts) as slurm:
        return _train(hosts, slurm, fault, restarts, options, env or {})


def _folder(hosts):
    """A folder that the hosts share, with the program."""
    folder = hosts.folder / "job"
    folder.mkdir()
    numbers = f"STEPS, SAVED, AT, FAULTY = {STEPS}, {SAVED}, {AT}, {FAULTY}\n"
    (folder / "train.py").write_text(numbers + TRAIN)
    return folder


def _environment():
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "HPCDIST_TIMEOUT": f"{5 * slowness():g}"}


def _train(hosts, slurm, fault, restarts, options, env):
    folder = _folder(hosts)
    shape = Shape(
        kind="train", ntasks_per_node=2, restarts=restarts, spare_nodes=1, checkpoint="model.h5",
        command=("python", "train.py", fault),
    )  # fmt: skip
    (folder / "job.sbatch").write_text(write(shape))
    env = {**slurm.mpi_environment(), **_environment(), **env}
    job = slurm.submit("job.sbatch", options=options, cwd=folder, env=env)
    said = folder / "fault"
    if fault in ("power", "wire"):
        end = time.monotonic() + 60 * slowness()
        while not said.exists():
            assert time.monotonic() < end, slurm.output(job)
            time.sleep(0.1)
        (hosts.unplug if fault == "wire" else hosts.off)(json.loads(said.read_text())["host"])
    ended = slurm.wait(job, 120)
    firsts = re.findall(r"^first step (\d+) of run (\d+) on (\d) nodes at (\S+)$", ended.out, re.MULTILINE)
    later = [float(at) for *_, at in firsts[1:2]]
    seconds = later[0] - json.loads(said.read_text())["time"] if later and said.exists() else 0.0
    steps = [(int(step), int(run), int(nodes)) for step, run, nodes, _ in firsts]
    return Went(ended, steps, re.findall(r"^weights (.*)$", ended.out, re.MULTILINE), seconds)


@pytest.fixture(scope="module")
def undisturbed():
    went = train("none")
    assert went.ended.state == "COMPLETED", went.ended.out
    assert went.firsts == [(0, 0, 2)] and "restart 1" not in went.ended.out
    return went.weights


@pytest.mark.parametrize("fault", ["kill", "stop", "raise", "power", "wire"])
def test_a_training_goes_on_from_its_checkpoint(fault, undisturbed):
    went = train(fault)
    assert (went.ended.state, went.ended.status, went.ended.restarts) == ("COMPLETED", 0, 0), went.ended.out
    assert went.firsts == [(0, 0, 2), (SAVED, 1, 2)], went.ended.out
    assert went.weights == undisturbed, went.ended.out
    nodes = "node1, node2" if fault == "raise" else "node1, node3"
    assert f"restart 1 of 3 on {nodes}, from model.h5\n" in went.ended.out


def test_an_error_of_the_program_ends_the_job():
    went = train("bug")
    assert (went.ended.state, went.ended.restarts) == ("FAILED", 0), went.ended.out
    assert [run for _, run, _ in went.firsts] == [0, 1], went.ended.out
    assert "the fault is in the program: the same error twice, and nothing saved between the two\n" in went.ended.out


def test_a_training_that_stops_in_time_is_requeued_and_restarted():
    """Both: it fails, starts again, is told to stop, and goes back to the queue."""
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        (hosts.folder / "stops.py").write_text(STOPS)
        command = ("python", "stops.py")
        shape = Shape(kind="requeue", nodes=1, spare_nodes=1, ntasks_per_node=2, restarts=3, command=command)
        (hosts.folder / "job.sbatch").write_text(write(shape))
        env = {**slurm.mpi_environment(), **_environment()}
        job = slurm.submit("job.sbatch", cwd=hosts.folder, env=env)
        end = time.monotonic() + 90 * slowness()
        while not (hosts.folder / "again").exists():
            assert time.monotonic() < end, slurm.output(job)
            time.sleep(0.1)
        slurm.run(["scancel", "--batch", "--signal=USR1", job])
        ended = slurm.wait(job)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), ended.out
    assert "restart 1 of 3 on node1, from its beginning, unless it saves something else than checkpoint\n" in ended.out
    assert ended.out.count("received SIGUSR1") == 1, ended.out


def test_a_training_goes_on_under_pbs(undisturbed):
    """By the mpirun of this environment. What PBS has set is set here."""
    with Hosts(3) as hosts:
        folder = _folder(hosts)
        shape = Shape(
            kind="train", scheduler="pbs", ntasks_per_node=2, restarts=3, spare_nodes=1, checkpoint="model.h5",
            command=("python", "train.py", "stop"),
        )  # fmt: skip
        (folder / "job.pbs").write_text(write(shape))
        (folder / "nodes").write_text("".join(f"{name}\n" * 2 for name in hosts.names))
        env = {**hosts.mpi_environment(), **_environment(), "PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(folder)}
        job = hosts.start("node1", ["bash", "job.pbs"], folder, {**env, "PBS_NODEFILE": str(folder / "nodes")})
        done = job.wait(120)
    assert done.status == 0, done
    assert re.findall(r"^weights (.*)$", done.out, re.MULTILINE) == undisturbed, done
    assert "restart 1 of 3 on node1, node3, from model.h5\n" in done.out, done


STOPS = """
import os, sys, time, hpcdist as hd
with hd.init() as world:
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        sys.exit(0)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
    while not world.should_stop():
        open("again", "w").close()
        time.sleep(0.05)
    if world.rank == 0:
        print(world.stop_reason)
    sys.exit(75)
"""
