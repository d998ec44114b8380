"""Jobs that call torch.distributed with backend "mpi": how they begin, hang and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import Job, mpirun

from hpcdist.runtime.registration import BINDS

PROGRAM = str(Path(__file__).with_name("process_groups.py"))


def run(case: str, np: int, **env: str) -> Job:
    return mpirun(np, PROGRAM, case, str(max(1, np)), env=env)


@pytest.mark.parametrize("np", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["alone", "init", "gloo", "destroyed"])
def test_a_job_begins_and_ends(case: str, np: int) -> None:
    job = run(case, np)
    assert (job.status, job.out.count("survived")) == (0, max(1, np)), job.err


def test_a_hung_step_is_named_with_the_line_of_the_program() -> None:
    job = run("hung", 2, LIMIT="1.5")
    assert job.status != 0
    assert "survived" not in job.out
    assert re.search(
        r"HangError: \S+\(\) at .*process_groups.py:\d+ has waited for \d\.\d s, its deadline is 1.5 s", job.err
    )
    assert re.search(
        r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python, at .*process_groups.py:\d+", job.err
    ), job.err


def test_a_group_has_its_own_deadline() -> None:
    job = run("group_timeout", 2)
    assert job.status != 0
    assert re.search(
        r"HangError: all_reduce\(\) at .*process_groups.py:\d+ has waited for .* its deadline is 1 s", job.err
    )


@pytest.mark.once
def test_a_group_without_a_deadline_has_that_of_the_world() -> None:
    job = run("world_timeout", 2, LIMIT="1.5")
    assert job.status != 0
    assert re.search(r"HangError: all_reduce\(\) at .* its deadline is 1.5 s", job.err), job.err


@pytest.mark.once
def test_an_aborted_group_waits_for_nobody() -> None:
    job = run("aborted", 2)
    assert job.out.count("survived") == 2, job.err


@pytest.mark.once
@pytest.mark.parametrize("async_op", "01")
def test_a_call_has_its_own_deadline(async_op: str) -> None:
    job = run("call_timeout", 2, ASYNC=async_op)
    assert job.status != 0
    assert re.search(
        r"HangError: all_reduce\(\) at .*process_groups.py:\d+ has waited for .* its deadline is 1 s", job.err
    ), job.err


@pytest.mark.once
def test_ranks_in_different_calls_are_told_so() -> None:
    job = run("different", 2)
    assert job.status != 0
    at = r"at \S*process_groups.py:\d+"
    assert re.search(rf"rank 1: is in broadcast\(\) .* {at}, and rank 0 in all_reduce\(\) .* {at} \[HD301\]", job.err)


@pytest.mark.once
def test_a_message_that_does_not_come() -> None:
    job = run("recv", 2, LIMIT="1")
    assert re.search(r"HangError: recv\(\) at .*process_groups.py:\d+ has waited", job.err), job.err
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not reached this call", job.err), job.err


@pytest.mark.once
def test_a_dead_rank_is_named() -> None:
    """Under Open MPI: MPICH's launcher ends the job before a rank can say a word, see tests/watch/test_hangs.py."""
    job = run("killed", 2)
    assert job.status != 0
    assert re.search(r"rank 1 \(\S+, pid \d+\) is dead", job.err), job.err


def test_an_uncaught_error_ends_the_job_and_is_printed() -> None:
    job = run("raises", 2)
    assert job.status != 0
    assert "a mistake of rank 1" in job.err
    assert "survived" not in job.out


@pytest.mark.once
def test_monitored_barrier_names_who_is_missing() -> None:
    job = run("monitored", 3)
    assert job.status != 0
    assert re.search(r"monitored_barrier\(\) at \S*process_groups.py:\d+ has waited for .* is 0.5 s", job.err), job.err
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not reached this call", job.err), job.err


@pytest.mark.once
@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, "rank 0 of 3"),
        ({"RANK": "0"}, "WORLD_SIZE expected"),
    ],
)
def test_what_the_environment_says_must_agree_with_mpi(env: dict[str, str], text: str) -> None:
    store = "store=dist.HashStore(), rank=0, world_size=3" if "WORLD_SIZE" in env else ""
    code = f"""
        import hpcdist, torch.distributed as dist
        dist.init_process_group("mpi", {store})
    """
    job = mpirun(1, code=code, env={} if store else env)
    assert job.status != 0
    assert text in job.err, job.err


@pytest.mark.once
@pytest.mark.parametrize(("size", "text"), [("dist_size", "as told"), ("7", "rank 0 of 7, but MPI has rank 0 of 2")])
def test_rank_and_size_may_be_given_without_an_address(size: str, text: str) -> None:
    """As scripts do that read them from variables of the launcher."""
    code = f"""
        import hpcdist, torch.distributed as dist
        from mpi4py import MPI
        dist_size = MPI.COMM_WORLD.size
        dist.init_process_group("mpi", rank=MPI.COMM_WORLD.rank, world_size={size})
        dist.barrier()
        print("as told")
    """
    job = mpirun(2, code=code)
    assert (job.status == 0) == (size == "dist_size")
    assert text in job.out + job.err, job.err


@pytest.mark.once
def test_the_import_alone_leaves_torchs_other_backends_alone() -> None:
    """Without a launcher: what has no variables is an error of torch's, unless it names this backend."""
    code = """
        import hpcdist, torch.distributed as dist
        for backend in ("gloo", None):
            try: dist.init_process_group(backend)
            except ValueError as error: print(error)
        dist.init_process_group("mpi")
        print(dist.get_backend(), dist.get_world_size())
    """
    job = mpirun(0, code=code)
    assert job.status == 0, job.err
    assert job.out.count("environment variable RANK expected, but not set") == 2, job
    assert job.out.endswith("mpi 1\n"), job
    assert mpirun(2, code="import hpcdist, torch.distributed as dist; dist.init_process_group('gloo')").status == 0


# "nccl" is a backend in Python that records what torch asks of it, on ranks that see 4 GPUs.
BOUND = """
    from types import SimpleNamespace
    import torch, torch.distributed as dist
    import hpcdist as hd
    from hpcdist.runtime import background
    from mpi4py import MPI
    from torch._C._distributed_c10d import Backend

    class Nccl(Backend):
        supports_splitting = True
        supports_coalescing = supports_abort_hooks = supports_reconfigure = supports_window = False
        supports_shrinking = _supports_time_estimate = False
        options = property(lambda self: self._options)
        def __init__(self, rank, size):
            super().__init__(rank, size)
            self._options = Backend.Options("nccl")
            made.append(self)
        def getBackendName(self): return "nccl"
        def eager_connect_single_device(self, device): log.append(f"connect {device}")
        def perform_nocolor_split(self, device): log.append(f"no color {device}")
        def split(self, store, ranks, options):
            log.append(f"split {list(ranks)}")
            return Nccl(list(ranks).index(rank), len(ranks))
        def shutdown(self): pass
    def create(options, _):
        log.append(f"create {options.process_group.bound_device_id}")
        source, ranks = options.split_from, options.global_ranks_in_group
        return source.split(options.store, ranks, None) if source else Nccl(options.group_rank, options.group_size)
    def asked():
        found = ", ".join(log)
        log.clear()
        return found
    def total(group):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=group)
        return x.item()

    log, made, rank = [], [], MPI.COMM_WORLD.rank
    dist.Backend._ensure_backend_registered("nccl")
    dist.Backend._plugins["NCCL"] = dist.Backend._BackendPlugin(create, True)
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 4
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        pci_domain_id=0, pci_bus_id=index, pci_device_id=0, uuid=""
    )
    torch.accelerator.set_device_index = lambda device: None
    background.leave_all = lambda teams: []  # which asks the GPU for a stream
    with hd.init(device=f"cuda:{2 + rank}") as world:
        gpu = f"cuda:{2 + rank}"
        assert asked() == f"create {gpu}, connect {gpu}"
        for backend in ("mpi", "gloo"):
            for ranks in ([0, 1], [0]):
                group = dist.new_group(ranks, backend=backend)
                if rank in ranks:
                    assert str(group.bound_device_id) == gpu and total(group) == sum(ranks) + len(ranks)
                assert asked() == ""
        mixed = dist.new_group([0])
        assert asked() == (f"no color {gpu}" if rank else f"create {gpu}, split [0], connect {gpu}")
        assert rank or total(mixed) == 1
        alone = dist.split_group(split_ranks=[[0], [1]])
        assert asked() == f"split [{rank}]" and str(alone.bound_device_id) == gpu and total(alone) == rank + 1
        turned = dist.split_group(dist.new_group(backend="mpi"), split_ranks=[[1, 0]])
        assert turned.rank() == 1 - rank and total(turned) == 3
    dist.init_process_group("mpi", device_id=torch.device("cpu:0"))
    assert [total(dist.new_group(ranks)) for ranks in ([0, 1], [rank, 1 - rank])] == [3, 3]
    some = dist.new_group([0])
    assert rank or total(some) == 1
    print("survived")
"""

if BINDS:  # torch asks this of a group's backends

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"])
    def test_groups_beside_one_that_is_bound_to_a_gpu(level: str) -> None:
        """Those of backend "mpi" are neither split from NCCL's nor do they keep its ranks waiting."""
        job = mpirun(2, code=BOUND, env={"TORCH_DISTRIBUTED_DEBUG": level})
        assert (job.status, job.out.count("survived")) == (0, 2), job.err
