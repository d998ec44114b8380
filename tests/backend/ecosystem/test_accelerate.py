"""accelerate on ranks that MPI started: after hd.init() it finds the process group. tests/clients trains with it."""

import os

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, utils
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """accelerate sets variables, and keeps its state for the rest of the process."""
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


def _accelerator(**kwargs):
    """Without GPUs: cpu=True says so, without which it takes every rank for a job of its own."""
    return Accelerator(cpu=True, **kwargs)


@pytest.mark.parametrize("samples", [1, 13])
def test_metrics_of_a_ragged_last_batch(findings, samples):
    """gather_for_metrics: each sample once and in order, though ranks fill up the last batch."""
    accelerator = _accelerator()
    data = TensorDataset(torch.arange(samples), torch.arange(3 * samples).view(samples, 3))
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    parts = [accelerator.gather_for_metrics((index, {"x": x, "twice": 2 * x})) for index, x in loader]
    findings.same(torch.cat([index for index, _ in parts]), torch.arange(samples), "samples")
    findings.same(torch.cat([d["twice"] for _, d in parts]), 2 * torch.arange(3 * samples).view(samples, 3), "rows")


def test_batches_that_one_process_reads(world, findings):
    """dispatch_batches: the main process reads and broadcasts; the others get their part."""
    size = world.world_size
    config = utils.DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    accelerator = _accelerator(dataloader_config=config)
    samples = 4 * size * 3 - 1
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=4 * size))
    got = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    findings.same(got, torch.arange(samples), "samples")


def test_what_it_moves_between_ranks(world, findings):
    """gather, reduce, pad, broadcast, objects."""
    size, rank = world.world_size, world.rank
    accelerator = _accelerator()
    found = (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index)
    findings.check(found == (size, rank, world.local_rank), found)
    findings.check(dist.group.WORLD is world.group, "another process group")
    accelerator.wait_for_everyone()
    x = torch.arange(3.0) + 10 * rank
    whole = [torch.arange(3.0) + 10 * r for r in range(size)]
    findings.same(accelerator.gather(x), torch.cat(whole), "gather")
    findings.same(accelerator.gather(torch.tensor(rank)).view(size), torch.arange(size), "gather of values")
    findings.same(accelerator.reduce(x.clone(), "sum"), torch.stack(whole).sum(0), "sum")
    findings.same(accelerator.reduce(x.clone(), "mean"), torch.stack(whole).mean(0), "mean")
    ragged = accelerator.pad_across_processes(torch.full((rank + 1, 2), rank), dim=0, pad_index=-1)
    findings.check(ragged.shape == (size, 2), f"padded to {tuple(ragged.shape)}")
    findings.same(utils.broadcast(x.clone(), from_process=size - 1), whole[-1], "broadcast")
    findings.check(utils.gather_object([("rank", rank)]) == [("rank", r) for r in range(size)], "objects")
    shared = utils.broadcast_object_list([{"from": rank}, rank], from_process=0)
    findings.check(shared == [{"from": 0}, 0], f"objects of rank 0: {shared}")
    if size > 1:
        accelerator.set_trigger() if rank == size - 1 else None
        findings.check(accelerator.check_trigger(), "a trigger on one rank")
    with accelerator.split_between_processes(list(range(2 * size + 1))) as mine:
        findings.check(
            [i for part in world.comm.allgather(mine) for i in part] == list(range(2 * size + 1)), f"got {mine}"
        )
