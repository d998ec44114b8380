"""hpcdist.horovod: values encode the rank; the reference is plain arithmetic."""

from importlib import import_module

import pytest
import torch

import hpcdist
import hpcdist.horovod as hvd

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _start():
    hvd.init()


def test_ranks():
    world = hpcdist.current()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (world.rank, world.world_size, world.local_rank)
    assert hvd.local_size() * hvd.cross_size() == hvd.size() and hvd.cross_rank() == world.node and hvd.is_initialized()
    assert hvd.is_homogeneous() and hvd.mpi_ops.Sum is hvd.Sum and import_module("hpcdist.horovod.mpi_ops") is hvd


def test_between_shutdown_and_init(monkeypatch):
    """A ValueError, as Horovod's, also where the world is there already, as under hpcdist.run."""
    monkeypatch.setattr(hvd, "_registered", {})
    facts = (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_rank, hvd.local_size, hvd.cross_size, hvd.is_homogeneous)
    calls = (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters([("x", torch.ones(1))], 0),
    )
    assert not hvd.is_initialized()
    for ask in (*facts, hvd.mpi_threads_supported, hvd.barrier, hvd.join, *calls):
        with pytest.raises(ValueError, match=r"has not been initialized.*HD112"):
            ask()
    hvd.init(process_sets="dynamic")
    assert hvd.rank() == hpcdist.current().rank


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_allreduce(dtype):
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((3,), rank + 1, dtype=dtype)
    total = size * (size + 1) // 2
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [total] * 3
    assert hvd.allreduce(x, op=hvd.Max).tolist() == [size] * 3
    assert hvd.allreduce(x, op=hvd.Sum, postscale_factor=2).tolist() == [2 * total] * 3
    assert x.tolist() == [rank + 1] * 3
    hvd.allreduce_(x, op=hvd.Product)
    assert x.tolist() == [torch.arange(1, size + 1).prod().item()] * 3


def test_ragged():
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((rank, 2), float(rank), requires_grad=True)
    whole = hvd.allgather(x)
    assert whole[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    whole.sum().backward()
    assert x.grad.tolist() == [[1, 1]] * rank
    rows = torch.tensor([10 * rank + dest for dest in range(size) for _ in range(dest)])
    got, splits = hvd.alltoall(rows, list(range(size)))
    assert got.tolist() == [10 * source + rank for source in range(size) for _ in range(rank)]
    assert splits.tolist() == [rank] * size
    part = hvd.reducescatter(torch.arange(size + 1.0), op=hvd.Sum)
    assert part.tolist() == ([0, size] if rank == 0 else [(rank + 1) * size])


def test_any_order():
    """Names decide, not the order; what nobody else submits is an error on all ranks."""
    rank, size = hvd.rank(), hvd.size()
    order = ["a", "b", "c"][:: -1 if rank == 0 else 1]
    handles = {name: hvd.allreduce_async(torch.tensor([float(ord(name))]), name=name) for name in order}
    for name in order[::-1] if rank == size - 1 else order:
        assert hvd.synchronize(handles[name]).item() == ord(name)
    if size > 1:
        with pytest.raises(hpcdist.RankError, match="was not submitted"):
            hvd.allreduce(torch.zeros(1), name=f"only on {rank}")
        with pytest.raises(hpcdist.RankError, match="where another rank has"):
            hvd.allreduce(torch.zeros(rank + 1))
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.allgather_object(rank) == list(range(size))


def test_join():
    rank, size = hvd.rank(), hvd.size()
    for _ in range(rank):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1)).item() == 1  # without a name


def test_optimizer():
    """Ranks use other parameters; the step is that of the mean gradient."""
    rank, size = hvd.rank(), hvd.size()
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)])
    ((a if rank % 2 else b) * (rank + 1)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    for p, parity in ((a, 1), (b, 0)):
        want = -sum(r + 1 for r in range(size) if r % 2 == parity) / size
        assert torch.allclose(p.detach(), torch.full((2,), want))
    hvd.broadcast_parameters([("a", a), ("b", b)], 0)
    hvd.broadcast_optimizer_state(optimizer, 0)


def test_process_sets():
    rank, size = hvd.rank(), hvd.size()
    if size > 1:
        first = hvd.add_process_set([0])
        with pytest.raises(ValueError, match="HD114"):
            hvd.add_process_set([0])
        if rank == 0:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 1
        else:
            with pytest.raises(ValueError, match="HD702"):
                hvd.allreduce(torch.ones(1), process_set=first)
        assert hvd.remove_process_set(first)


def test_wrong_calls():
    """Each is refused on the rank that makes it, and the next call works."""
    x = torch.ones(2)
    handle = hvd.allreduce_async(x, name="twice", op=hvd.Sum)
    for error, ask in (
        (ValueError, lambda: hvd.allreduce_async(x, name="twice")),
        (ValueError, lambda: hvd.synchronize(hvd.allreduce(x))),
        (ValueError, lambda: hvd.poll(None)),
        (ValueError, lambda: hvd.allreduce(1.0)),
        (ValueError, lambda: hvd.broadcast(x, hvd.size())),
        (ValueError, lambda: hvd.alltoall(x, [3] * hvd.size())),
        (TypeError, lambda: hvd.allgather(x, op=hvd.Sum)),
        (TypeError, lambda: hvd.allreduce(x, None, average=True)),
    ):
        with pytest.raises(error, match="HD702"):
            ask()
    assert hvd.synchronize(handle).tolist() == hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def test_an_error_is_of_its_operation():
    """What is submitted beside it has its result; names of operations that were stuck can be used again."""
    rank, size = hvd.rank(), hvd.size()
    good, bad = hvd.allreduce_async(torch.ones(1), op=hvd.Sum), hvd.allreduce_async(torch.ones(1) * 1j, op=hvd.Min)
    with pytest.raises(ValueError, match="complex"):
        hvd.synchronize(bad)
    assert hvd.synchronize(good).item() == size
    for _ in range(2 if size > 1 else 0):
        handle = hvd.allreduce_async(torch.ones(1), name=f"only on {rank}")
        with pytest.raises(hpcdist.RankError, match="was not submitted"):
            hvd.allreduce(torch.ones(1), name=f"also only on {rank}")
        with pytest.raises(ValueError, match="an error has ended it"):
            hvd.synchronize(handle)
    if size > 1:  # here the other ranks go on; at the end of a program, they finalize
        with pytest.raises(hpcdist.RankError) as caught:
            hvd.allreduce(torch.ones(1), name="lonely") if rank == 0 else hpcdist.gather(torch.ones(1))
        assert rank > 0 or any("waits for 'lonely'" in note for note in caught.value.__notes__)


def test_gradients():
    rank, size = hvd.rank(), hvd.size()
    total, mean = size * (size + 1) / 2, (size + 1) / 2  # of the gradients, rank + 1, of all results
    wanted = {
        lambda x: hvd.allreduce(x, op=hvd.Sum): [total] * size,
        lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16): [mean] * size,
        lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1]: [2 * total] * size,
        lambda x: hvd.broadcast(x, 0): [mean * (rank == 0)] * size,
        lambda x: hvd.alltoall(x): [dest + 1 for dest in range(size)],
        lambda x: hvd.reducescatter(x, op=hvd.Sum): [size * (dest + 1) for dest in range(size)],
    }
    for call, want in wanted.items():
        x = torch.ones(size, requires_grad=True)
        ((rank + 1) * call(x)).sum().backward()
        assert x.grad.tolist() == pytest.approx(want)


def test_an_optimizer_that_is_dropped_counts_no_more():
    p = torch.nn.Parameter(torch.zeros(2))
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
        for _ in range(2):
            p.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert p.tolist() == [-4, -4]
    p.sum().backward()
    with pytest.raises(AssertionError, match="HD702"):
        p.sum().backward()
    optimizer.step()


def test_optimizer_state():
    """The root alone has it."""
    rank, p = hvd.rank(), torch.nn.Parameter(torch.full((2,), 1.0))
    optimizer = torch.optim.Adam([p], lr=0.5 + rank)
    if rank == 0:
        (p * torch.tensor([3.0, 4.0])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.allclose(optimizer.state[p]["exp_avg"], torch.tensor([0.3, 0.4])) and optimizer.state[p]["step"] == 1


def test_refused():
    for ask in (lambda: hvd.elastic, lambda: hvd.SyncBatchNorm, lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum)):
        with pytest.raises(NotImplementedError, match="HD702"):
            ask()
