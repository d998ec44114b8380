"""init(), World and finalize(): in the job that runs the tests, and in jobs of their own."""

from __future__ import annotations

import os
import socket
import textwrap
from pathlib import Path

import pytest
import torch
from launch import mpirun, python, run

from hpcdist.tensors.accelerator import shared_gpu

HEAD = """
    import os, socket, sys, time
    import torch, torch.distributed as dist
    from mpi4py import MPI
    import hpcdist as hd
    def say(text): os.write(1, (text + "\\n").encode())  # one write a line: the ranks' lines do not mix
"""


def job(np: int, body: str, **kwargs: object) -> list[str]:
    """The sorted lines that the ranks of a job print."""
    done = mpirun(np, code=HEAD + body, **kwargs)  # type: ignore[arg-type]
    assert done.status == 0, done.err
    return sorted(done.out.splitlines())


@pytest.mark.parametrize("np", [0, 1, 4])
def test_the_world_is_that_of_mpi(np: int) -> None:
    lines = job(
        np,
        """
    world = hd.init()
    comm = MPI.COMM_WORLD
    assert (world.rank, world.world_size) == (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    assert (world.local_rank, world.node, world.nodes) == (comm.rank, 0, 1)
    assert world.group is dist.group.WORLD and world.comm is comm and world.device == torch.device("cpu")
    x = torch.tensor([world.rank + 1.0])
    dist.all_reduce(x)
    say(f"{world.rank} {x.item():.0f}")
    """,
    )
    size = max(np, 1)
    assert lines == [f"{rank} {size * (size + 1) // 2}" for rank in range(size)]


def test_init_again_gives_the_same_world_and_after_finalize_a_new_one() -> None:
    lines = job(
        2,
        """
    world = hd.init()
    assert hd.init() is world is hd.current()
    try: hd.init(backend="nonsense")
    except ValueError as error: assert "other arguments" in str(error)
    world.finalize(); world.finalize(); hd.finalize()
    assert not dist.is_initialized()
    try: hd.concat(torch.ones(1))
    except hd.HpcdistError as error: assert "hpcdist.init()" in str(error)
    with hd.init() as again:
        assert again is not world and hd.concat(torch.tensor(again.rank)).tolist() == [0, 1]
    assert not dist.is_initialized() and not MPI.Is_finalized()
    MPI.COMM_WORLD.Barrier()
    say("ok")
    """,
    )
    assert lines == ["ok", "ok"]


def test_torch_initialised_by_the_caller_is_used_as_it_is() -> None:
    """Even if it numbers the ranks the other way round; and finalize leaves it alone."""
    lines = job(
        3,
        """
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
    say("ok")
    """,
    )
    assert lines == ["ok"] * 3


def test_a_communicator_of_some_ranks() -> None:
    lines = job(
        3,
        """
    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == 0)
    world = hd.init(part)
    say(f"{hd.concat(torch.tensor(MPI.COMM_WORLD.rank)).tolist()}")
    """,
    )
    assert lines == ["[0]", "[1, 2]", "[1, 2]"]


def test_library_traffic_does_not_meet_the_users() -> None:
    """A message of the user's that waits on COMM_WORLD, from any source with any tag, is still there afterwards."""
    lines = job(
        2,
        """
    world = hd.init()
    peer = 1 - world.rank
    request = world.comm.isend(f"from {world.rank}", peer, tag=0)
    big = torch.arange(300_000)
    for route in ("mpi", "gloo"):
        assert torch.equal(hd.concat(big, route=route), torch.cat([big, big]))
    assert world.comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) == f"from {peer}"
    request.wait()
    say("ok")
    """,
    )
    assert lines == ["ok", "ok"]


@pytest.mark.parametrize("start", ["hd.init()", "hd.init(backend='gloo')", "dist.init_process_group('mpi')"])
def test_nothing_listens_beyond_loopback_on_one_node(start: str) -> None:
    """The store and gloo, in the user's groups too, open sockets on the loopback interface alone; what MPI itself has
    opened before is its own. With DETAIL torch makes a group of gloo beside each of another backend."""
    lines = job(
        2,
        f"""
    def listening():
        descriptors = [f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd")]
        own = {{os.readlink(fd) for fd in descriptors if os.path.islink(fd)}}
        tables = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/net/{{name}}"))[1:]]
        return {{row[1] for row in tables if row[3] == "0A" and f"socket:[{{row[9]}}]" in own}}
    MPI.COMM_WORLD.Barrier()
    before = listening()
    {start}
    hd.concat(torch.ones(9), route="gloo")
    dist.all_reduce(torch.ones(9), group=dist.new_group(backend="gloo"))
    dist.barrier()
    for address in listening() - before: say(address.split(":")[0])
    dist.barrier()
    """,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert set(lines) == {"0100007F"}  # 127.0.0.1


def test_the_environment_is_the_users() -> None:
    """In the program and in what it starts, while the world is there, which adds torchrun's variables, and afterwards;
    what the user has set stays."""
    lines = job(
        2,
        """
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
    say("ok")
    """,
    )
    assert lines == ["ok", "ok"]


def test_two_jobs_at_the_same_moment_do_not_collide(tmp_path: Path) -> None:
    """Both read the port only once both stores are open."""
    from concurrent.futures import ThreadPoolExecutor

    body = """
    world = hd.init()
    say(f"{hd.concat(torch.tensor([world.rank])).tolist()}")
    """
    with ThreadPoolExecutor(2) as two:
        for lines in two.map(lambda _: job(2, body), range(2)):
            assert lines == ["[0, 1]", "[0, 1]"]


def test_n_worlds_of_one_for_real() -> None:
    """A launcher that this MPI library knows nothing of: every process stops with the explanation."""
    done = run([*python(), "-c", "import hpcdist; hpcdist.init()"], env={"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert done.status == 1
    assert "alone in its MPI world, but SLURM_NTASKS=4" in done.err


@pytest.mark.once
def test_too_few_files_are_refused_before_mpi_starts() -> None:
    """Also where MPI runs already; a command says it in one line."""
    for early in ("", "from mpi4py import MPI"):
        job = mpirun(2, code=f"""
            import os, resource
            import hpcdist
            {early}
            held = len(os.listdir("/proc/self/fd"))
            limit = held + {20 if early else 30}
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            try:
                hpcdist.init()
            except hpcdist.LaunchError as error:
                assert f"may open {{limit}} files" in str(error) and "[HD116]" in str(error), error
                assert f"ulimit -n $(ulimit -Hn) in the job script, which is {{limit}} here" in str(error), error
                print("refused")
        """)  # fmt: skip
        assert (job.status, job.out) == (0, "refused\n" * 2), job
    few = """
        import resource, runpy
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        runpy.run_module("hpcdist.gather", run_name="__main__", alter_sys=True)
    """
    job = mpirun(2, code=few)
    lines = [line for line in job.err.splitlines() if line.startswith("hpcdist gather: error: ")]
    assert len(lines) == 1, job.err
    assert "[HD116]" in lines[0]


@pytest.mark.once
def test_torchrun_for_real(tmp_path: Path) -> None:
    """Both processes stop, also where they have started torch.distributed; one world each only on purpose."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(HEAD)
        + textwrap.dedent("""
        def refused(*comm):
            try: hd.init(*comm)
            except hd.LaunchError as error: say(str(error))
        refused()
        assert hd.init(MPI.COMM_SELF).world_size == 1
        hd.finalize()
        dist.init_process_group("gloo")
        refused(MPI.COMM_SELF)
        dist.destroy_process_group()
        """)
    )
    words = [*python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    done = run(words, env={"PYTHON_EXEC": f"{python()[-1]}/python"})
    assert done.status == 0, done.err
    assert done.out.count("alone in its MPI world, but WORLD_SIZE=2: torchrun") == 2
    assert done.out.count("torch.distributed was started before hpcdist.init() with 2 ranks, where MPI has 1.") == 2


# Ranks on two nodes in turn, with 2 GPUs each, which have addresses; NCCL's group is one of gloo.
GPUS = """
    from types import SimpleNamespace
    from hpcdist.comm import rendezvous
    from hpcdist.runtime import background, registration
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    uuid, node, count = "", f"node{rank % 2}", 2
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


def test_a_group_of_nccl_is_bound_to_the_gpu_of_its_rank() -> None:
    """Where torch would bind it to another one: places are cyclic, ranks are fewer than GPUs, the program chooses."""
    lines = job(
        3,
        GPUS
        + """
    registration.BINDS, uuid = True, f"GPU-{rank}"
    def check(index, backend=None, **device):
        with hd.init(backend=backend, **device) as world:
            assert world.device == current[-1] == torch.device("cuda", index), world.device
            asked, device = bound.pop()
            assert asked.endswith("cuda:nccl") if backend is None else asked == backend
            assert device == (world.device if "nccl" in asked else None), (asked, device)
    check([0, 0, 1][rank])
    count = 4
    check([0, 0, 1][rank])
    check([2, 3, 1][rank], device=f"cuda:{[2, 3, 1][rank]}")
    check([0, 0, 1][rank], backend="cpu:gloo,cuda:nccl")
    check([0, 0, 1][rank], backend="gloo")
    registration.BINDS = False  # torch takes the GPU of the tensors, and would hang in new_group(..., backend="gloo")
    with hd.init(): assert bound.pop()[1] is None
    say("ok")
    """,
    )
    assert lines == ["ok"] * 3


def test_gpus_of_intel_take_the_same_way() -> None:
    """Stand-ins for torch's xpu and xccl: the device, torch's backend and the group of route nccl have their names."""
    body = """
    from types import SimpleNamespace
    from hpcdist.routes.select import load
    from hpcdist.runtime import background, world as worlds
    from hpcdist.tensors import accelerator
    rank = MPI.COMM_WORLD.rank
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
    try: hd.init()
    except hd.LaunchError as error: say(f"{error}")
    try: hd.init(device="cuda")
    except hd.RankError as error: assert "expected cpu or xpu" in str(error)
    """
    done = mpirun(2, code=HEAD + body)
    assert done.status == 0, done.err
    shared = [f"ranks 0 and 1 share one GPU ({socket.gethostname()}, UUID GPU-a), which XCCL refuses" in line
              for line in done.out.splitlines()]  # fmt: skip
    assert shared == [True, True], done.out


def test_gpus_are_told_apart_by_host_address_and_uuid() -> None:
    """Blank UUIDs are no reason to refuse a job, nor is one address of two GPUs; ranks that do share one are named."""
    lines = job(
        3,
        GPUS
        + """
    def starts(expected):
        try: hd.init().finalize()
        except hd.LaunchError as error: assert expected and expected in str(error), error
        else: assert not expected
    starts("")
    uuid = "GPU-a"
    starts("")
    node, count = "node1", 1
    starts("ranks 0 and 1 share one GPU (node1, PCI 0000:00:00, UUID GPU-a), which NCCL refuses")
    uuid = f"MIG-{rank}"
    starts("")
    hd.init(backend="gloo").finalize()
    say("ok")
    """,
    )
    assert lines == ["ok"] * 3


def test_ranks_that_share_a_gpu_are_named() -> None:
    assert shared_gpu(["GPU-a", "GPU-b", None]) is None
    text = shared_gpu(["GPU-a", "GPU-b", "GPU-a"])
    assert text is not None
    assert "ranks 0 and 2 share one GPU (GPU-a)" in text
    assert "backend='gloo'" in text


def test_nccl_without_gpus_is_refused_on_all_ranks() -> None:
    if torch.cuda.is_available():
        return
    lines = job(
        2,
        """
    try: hd.init(backend="nccl")
    except hd.LaunchError as error: say(f"{error}")
    """,
    )
    assert (
        lines == ["backend 'nccl' needs a GPU for every rank and a torch with NCCL; none on ranks [0, 1] [HD110]"] * 2
    )


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


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_argument_of_init_on_one_rank_is_refused_on_all(wrong: int) -> None:
    """Each in turn, in one job, which then starts as if nothing had happened."""
    calls = ", ".join(f"dict({argument})" for argument in WRONG)
    lines = job(
        2,
        f"""
    for number, arguments in enumerate([{calls}]):
        try: hd.init(**(arguments if MPI.COMM_WORLD.rank == {wrong} else {{}}))
        except hd.RankError as error: say(f"{{number:02}} " + str(error).replace("\\n", " "))
    assert hd.concat(torch.tensor(hd.init().rank)).tolist() == [0, 1]
    """,
    )
    assert len(lines) == 2 * len(WRONG)
    for number, message in enumerate(WRONG.values()):
        assert lines[2 * number] == lines[2 * number + 1]
        assert message in lines[2 * number]


def test_an_init_that_is_refused_frees_its_communicators() -> None:
    code = """
        import hpcdist as hd
        from hpcdist.comm import rendezvous
        from mpi4py import MPI
        made = []
        def noting(make): return lambda comm: made.append(make(comm)) or made[-1]
        rendezvous.in_torch_order, rendezvous.Nodes = noting(rendezvous.in_torch_order), noting(rendezvous.Nodes)
        for wrong in ({"timeout": "x"}, {"device": "meta"}):
            try: hd.init(**wrong)
            except hd.RankError: pass
        assert [getattr(comm, "local", comm) == MPI.COMM_NULL for comm in made] == [True] * 4, made
        assert hd.init().world_size == 2
    """
    job = mpirun(2, code=code)
    assert job.status == 0, job.err


def test_a_deadline_of_any_length() -> None:
    """What is longer than threads, poll and torch can count is as good as none; a wrong HPCDIST_TIMEOUT is told."""
    lines = job(
        2,
        """
    from datetime import timedelta
    from fractions import Fraction
    rank = MPI.COMM_WORLD.rank
    for number, text in enumerate(("nan", "-1", "abc", "0", "1e-9", "-inf")):
        for wrong in (0, 1):
            if rank == wrong: os.environ["HPCDIST_TIMEOUT"] = text
            try: hd.init()
            except hd.RankError as error: say(f"{number} " + str(error).split("\\n")[1])
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
    )
    expected = [(w, n, t) for n, t in enumerate(("nan", "-1", "'abc'", "0", "1e-09", "-inf")) for w in (0, 1)]
    assert [line.split(", expected")[0] for line in lines] == sorted(
        f"{n}   rank {w}: HPCDIST_TIMEOUT is {t}" for w, n, t in expected * 2
    )


def test_a_wrong_size_of_the_pool() -> None:
    """Refused on all ranks before anything has started: the next init() succeeds."""
    lines = job(
        2,
        """
    rank = MPI.COMM_WORLD.rank
    for wrong in (0, 1):
        if rank == wrong: os.environ["HPCDIST_CACHE"] = "much"
        try: hd.init()
        except hd.RankError as error: say(str(error).split("\\n")[1])
        os.environ["HPCDIST_CACHE"] = "5M" if rank else "0"
    hd.init()
    assert hd.memory.memory_stats()["limit_bytes"] == (5 * 2**20 if rank else 0)
    hd.concat(torch.zeros(2**20))
    assert hd.memory.memory_stats()["problem"] == ("" if rank else "switched off")
    hd.finalize()
    assert hd.memory.memory_stats()["limit_bytes"] == 0
    """,
    )
    assert sorted(line.split(", expected")[0] for line in lines) == sorted(
        f"  rank {wrong}: HPCDIST_CACHE is 'much'" for wrong in (0, 1) for _ in range(2)
    )


def test_mpi_that_mpi4py_was_told_not_to_start() -> None:
    done = mpirun(
        2,
        code="""
    import mpi4py
    mpi4py.rc.initialize = False
    import hpcdist as hd
    world = hd.init()
    print(hd.concat([world.rank]))
    """,
    )
    assert (done.status, done.out.splitlines()) == (0, ["[0, 1]"] * 2), done.err


def test_a_communicator_without_this_rank_is_refused() -> None:
    lines = job(
        2,
        """
    for comm in (MPI.COMM_NULL, "world"):
        try: hd.init(comm)
        except TypeError as error: say(str(error)[:37])
    """,
    )
    assert lines == ["comm must be an mpi4py Intracomm that"] * 4


def test_communicators_that_come_and_go_leave_nothing_behind() -> None:
    """More of them than an MPI library has at once: freeing one frees the library's duplicate."""
    lines = job(
        2,
        """
    world = hd.init()
    for _ in range(2200):
        comm = world.comm.Split(0, -world.rank)
        hd.concat(torch.tensor(world.rank), group=comm)
        comm.Free()
    assert len(world._context.teams) == 1
    say("ok")
    """,
    )
    assert lines == ["ok", "ok"]


def test_gloo_on_some_ranks_first_and_then_on_all() -> None:
    """The ranks have made different numbers of groups by then."""
    lines = job(
        3,
        """
    world = hd.init()
    part = world.comm.Split(0 if world.rank < 2 else MPI.UNDEFINED)
    if world.rank < 2:
        assert hd.concat(torch.tensor(world.rank), group=part, route="gloo").tolist() == [0, 1]
        dist.new_group([world.rank], use_local_synchronization=True)
    assert hd.gather(torch.ones(int(world.rank != 1)), route="gloo") is None or world.rank == 0
    say(str(hd.concat(torch.tensor(world.rank), route="gloo").tolist()))
    """,
    )
    assert lines == ["[0, 1, 2]"] * 3


def test_the_host_name_need_not_resolve(tmp_path: Path) -> None:
    """Addresses come from the interfaces; the name is only a hint."""
    from hpcdist.comm import rendezvous

    addresses = rendezvous._addresses()
    assert not any(address.startswith("127.") for address in addresses)
    for address in addresses:
        assert socket.inet_aton(address)


@pytest.mark.once
def test_the_staging_folder_by_argument_environment_and_default(tmp_path: Path) -> None:
    code = """
        import sys, hpcdist as hd
        with hd.init(device="cpu", staging=sys.argv[1] if len(sys.argv) > 1 else None) as world:
            print(world.staging)
    """
    here, there = tmp_path / "here", tmp_path / "there"
    env = {"HPCDIST_STAGING": str(there), "TMPDIR": str(tmp_path)}
    for args, environ, expected in (
        ([str(here)], env, here),
        ([], env, there),
        ([], {"TMPDIR": str(tmp_path)}, tmp_path / f"hpcdist-{os.getuid()}"),
    ):
        job = mpirun(0, "-c", textwrap.dedent(code), *args, env=environ)
        assert job.out.strip() == str(expected), job.err


@pytest.mark.once
def test_no_folder_for_temporary_files() -> None:
    """init() needs none; only the route does, and says what to do about it."""
    lines = job(
        2,
        """
    import tempfile
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']")
    tempfile.gettempdir = none
    access = os.access
    os.access = lambda path, *how: str(path) != "/tmp" and access(path, *how)
    with hd.init() as world:
        x = torch.ones(2)
        try:
            hd.concat(x, route="hdf5")
        except hd.RankError as error:
            say(str(error).splitlines()[1].strip())
        say(str(hd.concat(x).numel()))
        """,
        env={"HPCDIST_STAGING": ""},
    )
    advice = "(/tmp; set another by HPCDIST_STAGING or init(staging=...))"
    said = f"the staging folder: the folder is not writable [HD410] {advice}"
    assert lines == ["4", "4", f"rank 0: {said}", f"rank 0: {said}"]
