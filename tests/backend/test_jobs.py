"""Jobs that call torch.distributed with backend "mpi": how they begin, hang and end."""

import re
from pathlib import Path

import pytest
from launch import limit, mpirun

from hpcdist.runtime.registration import BINDS

PROGRAM = str(Path(__file__).with_name("process_groups.py"))


@pytest.mark.parametrize("np", [0, 3])
@pytest.mark.both
def test_jobs_begin_and_end(np):
    job = mpirun(np, PROGRAM, "worlds")
    assert (job.status, job.out.count("survived")) == (0, max(1, np)), job.err


AT = r"at \S*process_groups.py:\d+"
MISSING = r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python, "
HANG = rf"HangError: %s\(\) {AT} has waited"
CASES = {  # number of ranks, deadline of the job, what is said
    "hung": (4, 1.5, [HANG % "recv", HANG % "all_reduce", " for .* its deadline is ", MISSING + AT]),
    "timeouts": (4, 60, [HANG % "all_reduce" + " for .* its deadline is 1 s"]),
    "monitored": (3, 60, [HANG % "monitored_barrier" + " for .* is 0.5 s", MISSING]),
    "raises": (2, 60, ["a mistake of rank 1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_does_not_come_ends_the_job(case):
    np, seconds, said = CASES[case]
    job = mpirun(np, PROGRAM, case, env={"LIMIT": limit(seconds)["HPCDIST_TIMEOUT"]})
    assert job.status != 0
    assert "survived" not in job.out
    assert job.out.count("aborted") == 2 * (case == "raises"), job
    for text in said:
        assert re.search(text, job.err), (text, job.err)
    places = {*re.findall(HANG % "all_reduce", job.err)}
    assert len(places) == 3 or case != "timeouts", job.err  # one of each rank that waits


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
    hd.init(device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("mpi", device_id=torch.device("cpu:0"))
    assert [total(dist.new_group(ranks)) for ranks in ([0, 1], [rank, 1 - rank])] == [3, 3]
    some = dist.new_group([0])
    assert rank or total(some) == 1
    print("survived")
"""

if BINDS:  # torch asks this of a group's backends

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"])
    @pytest.mark.both
    def test_groups_beside_one_that_is_bound_to_a_gpu(level):
        """Those of backend "mpi" are neither split from NCCL's nor do they keep its ranks waiting."""
        job = mpirun(2, code=BOUND, env={"TORCH_DISTRIBUTED_DEBUG": level})
        assert (job.status, job.out.count("survived")) == (0, 2), job.err
