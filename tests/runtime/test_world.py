"""init(), World and finalize(): in the job that runs the tests, and in jobs of many worlds one after the other."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from launch import finished, mpirun, python, run
from mpi4py import MPI

HEAD = """
import os, socket, sys, time
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import torch, torch.distributed as dist
import hpcdist as hd
def say(text): os.write(1, (text + "\\n").encode())  # one write a line: the ranks' lines do not mix
def refused(call, *texts):
    try: call()
    except hd.HpcdistError as error: assert all(text in str(error) for text in texts), error
    else: raise AssertionError(texts)
world = hd.init()  # starts MPI, though mpi4py was told not to
rank, size = world.rank, world.world_size
assert hd.concat([rank]) == list(range(size))
world.finalize()
"""


def test_the_world_is_that_of_mpi(world, rank, findings):
    comm = MPI.COMM_WORLD
    ranks = {(rank, world.world_size), (comm.rank, comm.size), (dist.get_rank(), dist.get_world_size())}
    findings.check(len(ranks) == 1, ranks)
    found = (world.local_rank, world.node, world.nodes)
    findings.check(found == (comm.rank, 0, 1), found)
    findings.check(world.group is dist.group.WORLD and world.comm is comm, "another group or communicator")
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    findings.check(x.item() == comm.size * (comm.size + 1) // 2, x)


WRONG = {
    "device='toaster'": "toaster",
    "device='meta'": "device is meta, expected cpu or cuda",
    "device='cuda:99'": "device is cuda:99, but this process sees",
    "timeout='soon'": "timeout must be a timedelta or seconds, got str",
    "timeout=-1": "timeout is -1, expected seconds, 0.001 at least",
    "timeout=float('nan')": "timeout is nan, expected seconds",
    "timeout=1e-9": "timeout is 1e-09, expected seconds",
    "timeout=-10**5000": "timeout is -inf, expected seconds",
    "timeout=True": "timeout must be a timedelta or seconds, got bool",
    "backend=3": "backend must be a string, got int",
    "backend='gloo'": "rank 1: backend is",
}
TWO = {
    "init again": """
world = hd.init()
assert hd.init() is world is hd.current()
try: hd.init(backend="nonsense")
except ValueError as error: assert "other arguments" in str(error)
world.finalize(); world.finalize(); hd.finalize()
assert not dist.is_initialized()
refused(lambda: hd.concat(torch.ones(1)), "hpcdist.init()")
with hd.init() as again:
    assert again is not world and hd.concat(torch.tensor(again.rank)).tolist() == [0, 1]
assert not dist.is_initialized() and not MPI.Is_finalized()
MPI.COMM_WORLD.Barrier()
""",
    # In the program and in what it starts; the world adds torchrun's variables, and what the user has set stays.
    "the environment": """
import subprocess
from hpcdist.runtime import registration
def variables():
    child = subprocess.run(["env", "-0"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(os.environ), sorted(child.split("\\0"))
for given in ({}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7", "RANK": "7"}):
    os.environ.update(given)
    before = variables()
    for _ in range(2):
        world = hd.init()
        hd.concat(torch.ones(1), route="gloo")
        during = variables()
        assert before[0].items() <= during[0].items() and set(before[1]) <= set(during[1])
        assert during[0].keys() - before[0].keys() <= {
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            *("NODE_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        }
        with registration.host.making():
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
            assert os.environ["NCCL_SOCKET_IFNAME"] == given.get("NCCL_SOCKET_IFNAME", "lo")
        assert variables() == during
        world.finalize()
        assert variables() == before
        with registration.host.making(): assert variables() == before
for name in given: del os.environ[name]
""",
    # Each on one rank, in turn: refused on all with one text, and its communicators are freed.
    "wrong arguments": f"""
from hpcdist.launch import rendezvous
made, both = [], (rendezvous.in_torch_order, rendezvous.Nodes)
def noting(make): return lambda comm: made.append(make(comm)) or made[-1]
rendezvous.in_torch_order, rendezvous.Nodes = map(noting, both)
for wrong in (0, 1):
    for arguments, text in [{", ".join(f"(dict({given}), {text!r})" for given, text in WRONG.items())}]:
        try: hd.init(**(arguments if rank == wrong else {{}}))
        except hd.RankError as error: said = str(error).replace("\\n", " ")
        assert text in said and set(MPI.COMM_WORLD.allgather(said)) == {{said}}, said
        said = ""
assert made and all(getattr(comm, "local", comm) == MPI.COMM_NULL for comm in made), made
rendezvous.in_torch_order, rendezvous.Nodes = both
if not torch.cuda.is_available():
    text = "backend 'nccl' needs a GPU for every rank and a torch with NCCL; none on ranks [0, 1] [HD110]"
    refused(lambda: hd.init(backend="nccl"), text)
for comm in (MPI.COMM_NULL, "world"):
    try: hd.init(comm)
    except TypeError as error: assert "comm must be an mpi4py Intracomm that" in str(error)
    else: raise AssertionError(comm)
hd.init()
assert hd.concat(torch.tensor(rank)).tolist() == [0, 1]
""",
    # What is longer than threads, poll and torch can count is as good as none; a wrong HPCDIST_TIMEOUT is told.
    "deadlines": """
from datetime import timedelta
from fractions import Fraction
for text, said in {"nan": "nan", "-1": "-1", "abc": "'abc'", "0": "0", "1e-9": "1e-09", "-inf": "-inf"}.items():
    for wrong in (0, 1):
        if rank == wrong: os.environ["HPCDIST_TIMEOUT"] = text
        refused(hd.init, f"rank {wrong}: HPCDIST_TIMEOUT is {said}, expected")
        os.environ.pop("HPCDIST_TIMEOUT", None)
for said, given in (("1e300", None), ("inf", None), (None, timedelta.max), (None, 10**5000), (None, Fraction(90))):
    if said: os.environ["HPCDIST_TIMEOUT"] = said
    world = hd.init(timeout=given)
    os.environ.pop("HPCDIST_TIMEOUT", None)
    assert world.timeout.days == 36525 or world.timeout.seconds == 90, world.timeout
    for route in ("mpi", "gloo"): assert hd.concat(torch.tensor(rank), route=route).tolist() == [0, 1]
    dist.barrier()
    world.finalize()
""",
    # A wrong one is refused on all ranks before anything has started: the next init() succeeds.
    "the size of the pool": """
for wrong in (0, 1):
    if rank == wrong: os.environ["HPCDIST_CACHE"] = "much"
    refused(hd.init, f"rank {wrong}: HPCDIST_CACHE is 'much', expected")
    os.environ["HPCDIST_CACHE"] = "5M" if rank else "0"
hd.init()
assert hd.memory.memory_stats()["limit_bytes"] == (5 * 2**20 if rank else 0)
hd.concat(torch.zeros(2**20))
assert hd.memory.memory_stats()["problem"] == ("" if rank else "switched off")
hd.finalize()
assert hd.memory.memory_stats()["limit_bytes"] == 0
del os.environ["HPCDIST_CACHE"]
""",
    # By argument, environment and default; and where there is none, only the route needs it, and says what to do.
    "the staging folder": """
import tempfile
base = MPI.COMM_WORLD.bcast(tempfile.mkdtemp())
def staging(given=None):
    with hd.init(staging=given) as world: return str(world.staging)
os.environ["HPCDIST_STAGING"] = f"{base}/there"
assert [staging(f"{base}/here"), staging()] == [f"{base}/here", f"{base}/there"]
del os.environ["HPCDIST_STAGING"]
tempfile.tempdir = base
assert staging() == f"{base}/hpcdist-{os.getuid()}", staging()
def none():
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']")
found, access = tempfile.gettempdir, os.access
tempfile.gettempdir, os.access = none, lambda path, *how: str(path) != "/tmp" and access(path, *how)
hd.init()
text = "rank 0: the staging folder: the folder is not writable [HD410] (/tmp; set another by HPCDIST_STAGING or"
refused(lambda: hd.concat(torch.ones(2), route="hdf5"), text)
assert hd.concat(torch.ones(2)).numel() == 4
tempfile.gettempdir, os.access, tempfile.tempdir = found, access, None
""",
    "too few files": """
import resource
before, limit = resource.getrlimit(resource.RLIMIT_NOFILE), 20  # which are open
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
advice = f"ulimit -n $(ulimit -Hn) in the job script, which is {before[1]}"
refused(hd.init, f"may open {limit} files", "[HD116]", advice)
resource.setrlimit(resource.RLIMIT_NOFILE, before)
""",
    # Stand-ins for torch's xpu and xccl: the device, torch's backend and the group of route nccl have their names.
    "gpus of intel": """
from types import SimpleNamespace
from hpcdist.routes.select import load
from hpcdist.runtime import background, world as worlds
from hpcdist.tensors import accelerator
accelerator.KIND, accelerator.LIBRARY, dist.is_xccl_available = "xpu", "xccl", lambda: True
torch.xpu.device_count, torch.xpu.get_device_properties = lambda: 1, lambda index: SimpleNamespace(uuid=uuid)
current, asked, made, make = [], [], [], dist.init_process_group
torch.accelerator.set_device_index = current.append
background.leave_all = lambda teams: []  # which asks the GPU for a stream
def gloo(backend, **options):
    asked.append(backend)
    make("gloo", **options)
class Xccl:
    Options = SimpleNamespace
    def __init__(self, store, rank, size, options): made.append((rank, size, options.group_name))
    def allreduce(self, tensors): return SimpleNamespace(wait=lambda: None)
    def shutdown(self): pass
dist.init_process_group, dist.ProcessGroupXCCL, uuid = gloo, Xccl, f"GPU-{rank}"
zeros, torch.zeros = torch.zeros, lambda size, device: zeros(size, device="cpu")
with hd.init() as world:
    assert world.device == current.pop() == torch.device("xpu", 0) and world.settings.own_gpus
    assert asked.pop().endswith(",xpu:xccl") and load("nccl").missing(worlds.team_of()) is None
    load("nccl").group(worlds.team_of())
    assert made == [(rank, 2, f"hpcdist/{worlds.team_of().number}")], made
    assert "of XCCL" in load("nccl").method(worlds.team_of(), "allgatherv", 8).name
uuid = "GPU-a"
refused(hd.init, f"ranks 0 and 1 share one GPU ({socket.gethostname()}, UUID GPU-a), which XCCL refuses")
refused(lambda: hd.init(device="cuda"), "expected cpu or xpu")
""",
}
# Ranks on two nodes in turn, with 2 GPUs each, which have addresses; NCCL's group is one of gloo.
GPUS = """
from types import SimpleNamespace
from hpcdist.launch import rendezvous
from hpcdist.runtime import background, registration
node, count, binds = f"node{rank % 2}", 2, registration.BINDS
def properties(index):
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=index, pci_device_id=0, uuid=uuid)
class Nodes(rendezvous.Nodes):
    def __init__(self, comm):
        super().__init__(comm)
        self.local_rank = rank // 2
socket.gethostname, rendezvous.Nodes, dist.is_nccl_available = lambda: node, Nodes, lambda: True
torch.cuda.device_count, torch.cuda.get_device_properties = lambda: count, properties
current, bound, make = [], [], dist.init_process_group
torch.accelerator.set_device_index = current.append
background.leave_all = lambda teams: []  # which asks the GPU for a stream
def made(backend, device_id=None, **options):
    bound.append((backend, device_id))
    make("gloo", **options)
dist.init_process_group = made
"""
THREE = {
    # Even if it numbers the ranks the other way round; and finalize leaves it alone.
    "torch by the caller": """
comm = MPI.COMM_WORLD
store = dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
port = comm.bcast(store.port if store else None)
store = store or dist.TCPStore("127.0.0.1", port, comm.size, False)
dist.init_process_group("gloo", store=store, rank=comm.size - 1 - comm.rank, world_size=comm.size)
world = hd.init()
assert world.rank == dist.get_rank() == comm.size - 1 - comm.rank
for route in ("mpi", "gloo"):
    assert hd.concat(torch.tensor(world.rank), route=route).tolist() == [0, 1, 2]
world.finalize()
assert dist.is_initialized()
dist.barrier()
dist.destroy_process_group()
""",
    "some ranks": """
hd.init(MPI.COMM_WORLD.Split(rank == 0))
assert hd.concat(torch.tensor(rank)).tolist() == ([1, 2] if rank else [0])
""",
    # The ranks have made different numbers of groups by then.
    "gloo on some ranks first": """
world = hd.init()
part = world.comm.Split(0 if rank < 2 else MPI.UNDEFINED)
if rank < 2:
    assert hd.concat(torch.tensor(rank), group=part, route="gloo").tolist() == [0, 1]
    dist.new_group([rank], use_local_synchronization=True)
assert hd.gather(torch.ones(int(rank != 1)), route="gloo") is None or rank == 0
assert hd.concat(torch.tensor(rank), route="gloo").tolist() == [0, 1, 2]
""",
    # Where torch would bind it to another GPU: places are cyclic, ranks are fewer than GPUs, the program chooses.
    "a group of nccl is bound to the gpu of its rank": f"""{GPUS}
registration.BINDS, uuid = True, f"GPU-{{rank}}"
def check(index, backend=None, **device):
    with hd.init(backend=backend, **device) as world:
        assert world.device == current[-1] == torch.device("cuda", index), world.device
        asked, device = bound.pop()
        assert asked.endswith("cuda:nccl") if backend is None else asked == backend
        assert device == (world.device if "nccl" in asked else None), (asked, device)
check([0, 0, 1][rank])
count = 4
check([0, 0, 1][rank])
check([2, 3, 1][rank], device=f"cuda:{{[2, 3, 1][rank]}}")
check([0, 0, 1][rank], backend="cpu:gloo,cuda:nccl")
check([0, 0, 1][rank], backend="gloo")
registration.BINDS = False  # torch takes the GPU of the tensors, and would hang in new_group(..., backend="gloo")
with hd.init(): assert bound.pop()[1] is None
registration.BINDS = binds
""",
    # By host, address and UUID. Blank UUIDs are no reason to refuse a job, nor is one address of two GPUs.
    "ranks that share a gpu are named": """
def starts(expected):
    try: hd.init().finalize()
    except hd.LaunchError as error: assert expected and expected in str(error), error
    else: assert not expected
uuid, count = "", 2
starts("")
uuid = "GPU-a"
starts("")
node, count = "node1", 1
starts("ranks 0 and 1 share one GPU (node1, PCI 0000:00:00, UUID GPU-a), which NCCL refuses")
uuid = f"MIG-{rank}"
starts("")
hd.init(backend="gloo").finalize()
""",
}


@pytest.mark.parametrize(("np", "scenarios"), [(2, TWO), (3, THREE)])
@pytest.mark.both
def test_worlds_one_after_the_other(np, scenarios):
    """In one job, with the world ended after each scenario."""
    steps = [f"say({name!r})\n{code}\nhd.finalize()\n" for name, code in scenarios.items()]
    done = finished(np, code="".join([HEAD, *steps, "say('end')\n"]))
    assert sorted(done.out.splitlines()) == sorted([*scenarios, "end"] * np), done


def test_too_few_files_are_refused_before_mpi_starts():
    """By a command in one line. And where MPI runs already: see above."""
    few = """
        import resource, runpy
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        runpy.run_module("hpcdist.gather", run_name="__main__", alter_sys=True)
    """
    job = mpirun(2, code=few)
    (line,) = [line for line in job.err.splitlines() if line.startswith("hpcdist gather: error: ")]
    assert "may open 24 files" in line and "[HD116]" in line, job.err
    assert "ulimit -n $" not in line and "the hard limit, which is as low" in line, job.err


def test_torchrun_for_real(tmp_path):
    """Both processes stop, also where they have started torch.distributed; one world each only on purpose."""
    program = tmp_path / "program.py"
    code = """
        import os
        import torch.distributed as dist
        import hpcdist as hd
        from mpi4py import MPI
        def refused(*comm):
            try: hd.init(*comm)
            except hd.LaunchError as error: os.write(1, f"{error}\\n".encode())
        refused()
        assert hd.init(MPI.COMM_SELF).world_size == 1
        hd.finalize()
        dist.init_process_group("gloo")
        dist.barrier()  # or one process could leave while the other still connects
        refused(MPI.COMM_SELF)
        dist.destroy_process_group()
    """
    program.write_text(textwrap.dedent(code))
    done = run([*python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)])
    assert done.status == 0, done.err
    assert done.out.count("alone in its MPI world, but WORLD_SIZE=2: torchrun") == 2
    assert done.out.count("torch.distributed was started before hpcdist.init() with 2 ranks, where MPI has 1.") == 2
