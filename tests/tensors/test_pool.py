"""The pool of result memory: a block serves again when nothing refers to it any more, and never before."""

import gc
import io
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

import hpcdist as hd
from hpcdist import torch_names
from hpcdist.process import machine
from hpcdist.tensors import pool
from hpcdist.tensors.storage import DTYPES, as_bytes

MIB = 2**20
CPU = torch.device("cpu")
CALLS = 6


@pytest.fixture
def own(monkeypatch):
    """A pool of 64 MiB, instead of the world's."""
    found = pool.Pool(64 * MIB)
    monkeypatch.setattr(pool, "current", found)
    assert found.problem == ""
    yield found
    monkeypatch.undo()


def _pool():
    return pool.current


def _new(nbytes=MIB):
    return pool.empty([nbytes], torch.uint8, CPU)


# --- what keeps a block ----------------------------------------------------------------------------------------------


def _graph(x):
    """Only the graph refers to `x`: saved for the backward pass."""
    weight = torch.ones(x.shape, requires_grad=True)
    return (weight * x.view(x.shape)).sum()


KEEPERS = {
    "a view": lambda x: x[5:9],
    "a view as another dtype": lambda x: x.view(torch.int32),
    "a detached tensor": lambda x: x.detach(),
    "a parameter": lambda x: torch.nn.Parameter(x.view(torch.float32)),
    "its .data": lambda x: x.data,
    "its storage": lambda x: x.untyped_storage(),
    "its typed storage": lambda x: x.storage(),
    "a numpy array": lambda x: x.numpy(),
    "a view of a numpy array": lambda x: x.numpy()[3:4].T,
    "a memoryview": lambda x: memoryview(x.numpy()),
    "a dlpack capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "a tensor from dlpack": lambda x: torch.from_dlpack(x),
    "a tensor set to its storage": lambda x: torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()),
    "a graph": _graph,
    "a sparse tensor": lambda x: torch.sparse_coo_tensor(torch.tensor([[0]]), x[:1], (9,)),
    "a closure": lambda x: lambda: x,
    "a lazy clone": torch._lazy_clone,
}


ARRAYS = ("a numpy array", "a view of a numpy array", "a memoryview")


def test_what_was_an_array_serves_where_nothing_is_resized(own):
    for turn in range(4):
        x = pool.empty([MIB], torch.uint8, CPU, fixed=True)
        x.numpy()[:] = turn
        assert x.eq(turn).all()
        del x
    assert (own.made, own.reused) == (1, 3)
    assert _new().resize_(3 * MIB).numel() == 3 * MIB and own.made == 2


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", KEEPERS)
def test_what_keeps_a_block(own, name):
    x = _new()
    address = x.data_ptr()
    kept = KEEPERS[name](x.fill_(7))
    del x
    others = [_new().fill_(i) for i in range(4)]
    assert address not in [other.data_ptr() for other in others]
    if isinstance(kept, Tensor) and kept.dtype == torch.uint8 and not kept.is_sparse:
        assert kept.eq(7).all()
    del kept, others
    gc.collect()
    # What is copied on write is not the pool's any more, and what was an array cannot be resized any more.
    expected = 4 if name == "a lazy clone" or name in ARRAYS else 5
    assert len({x.data_ptr() for x in [_new() for _ in range(5)]}) == 5
    assert own.reused == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_serves_again(own, dtype):
    x = pool.empty((1024, 512), torch.float32, CPU)
    address, shape = x.data_ptr(), (512, 4096 // dtype.itemsize)
    del x
    y = pool.empty(shape, dtype, "cpu")
    assert y.data_ptr() == address and y.is_contiguous() and y.shape == shape and y.dtype == dtype
    assert y._base is None and not y._is_view() and not y.requires_grad and y.is_leaf
    version = y._version
    as_bytes(y[1:]).add_(1)
    assert y._version == version + 1
    assert own.stats()["num_reuses"] == 1 and own.stats()["num_allocations"] == 1


# --- blocks that change hands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(8 * MIB),
        lambda x: x.untyped_storage().resize_(0),
        lambda x: x.untyped_storage().resize_(64),
        lambda x: x.share_memory_(),
        lambda x: x.untyped_storage().share_memory_(),
    ],
    ids=["resize_", "resize_(0)", "smaller", "share_memory_", "storage.share_memory_"],
)
def test_a_block_that_is_not_what_it_was(own, change):
    x = _new(4 * MIB).fill_(5)
    change(x)
    del x
    gc.collect()
    own.sweep(0.0)
    assert own.total == 0 and own.stats()["idle_blocks"] == 0
    assert _new(4 * MIB).fill_(6).eq(6).all() and own.reused == 0


def test_a_forked_child(own):
    """Neither process disturbs the memory of the other; in the child the pool is empty."""
    held, idle = _new().fill_(1), _new().fill_(2)
    del idle
    own.sweep(0.0)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        torch.set_num_threads(1)  # the parent's threads, which torch may wait for, are not there
        try:
            pool.start(64 * MIB)
            started = _pool()
            fine = started.total == 0 and held.eq(1).all()
            more = [_new().fill_(9) for _ in range(3)]
            held.fill_(8)
            fine = fine and all(x.eq(9).all() for x in more) and started.made == 3
            os.write(theirs, b"x")
            status = 0 if fine else 2
        finally:
            os._exit(status)
    os.read(ours, 1)
    again = _new().fill_(4)
    assert os.waitpid(pid, 0)[1] == 0
    assert held.eq(1).all() and again.eq(4).all() and own.reused == 1
    os.close(ours), os.close(theirs)


def test_a_child_that_is_forked_while_a_thread_has_the_lock():
    began, end = threading.Event(), threading.Event()

    def hold():
        with _pool()._lock:
            began.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    began.wait(60)
    child = multiprocessing.get_context("fork").Process(target=hd.memory.empty_cache)
    child.start()
    child.join(30)
    end.set()
    thread.join()
    assert child.exitcode == 0


def test_threads(own):
    """Each fills and checks its own tensors, while others sweep and clear."""
    wrong = []
    end = time.monotonic() + 60

    def goes_on():
        return own.reused <= 50 and time.monotonic() < end

    def work(number):
        held = []
        turn = number
        while goes_on() or turn < 16 * 50:
            turn += 16
            x = _new(MIB + 4096 * (turn % 5)).fill_(turn % 251)
            held.append((x, turn % 251))
            if len(held) > 3:
                kept, value = held.pop(turn % 3)
                if not kept.eq(value).all():
                    wrong.append((number, turn))

    def maintain():
        while goes_on() or any(thread.is_alive() for thread in threads[:-1]):
            own.sweep(0.0)
            own.stats()
            own.clear()
            time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)] + [threading.Thread(target=maintain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and own.reused > 50, (wrong, own.stats())
    assert own.total == own.stats()["idle_bytes"] + own.stats()["in_use_bytes"] <= own.limit


def test_a_signal_handler_that_interrupts_the_pool(own):
    """It gets memory of its own, even if it comes between finding a block and making a tensor on it."""
    got = []

    def handler(*_):
        got.append(_new().fill_(1))
        hd.memory.empty_cache()
        hd.memory.memory_stats()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, 0.00001 + 0.0001 * random.random())
            x, y = _new().fill_(2), _new().fill_(3)
            assert x.eq(2).all() and y.eq(3).all() and all(z.eq(1).all() for z in got[-2:])
            del got[:-2]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- sizes, bound, order ---------------------------------------------------------------------------------------------


def test_ragged_sizes_find_a_block(own):
    sizes = [4 * MIB + 1000 * i for i in (3, 60, 17, 200, 4, 120)]  # all in one class
    for size in sizes:
        x = _new(size)
        assert size <= x.untyped_storage().nbytes() < size * 17 / 16
        del x
    assert own.made == 2 and own.reused == len(sizes) - 2


def test_one_size_has_no_slack(own):
    """So that torch.save, which writes the whole storage, writes no more."""
    for i in range(3):
        x = _new(MIB + 12345).fill_(i)
        assert x.untyped_storage().nbytes() == MIB + 12345
        file = io.BytesIO()
        torch.save(x, file)
        assert len(file.getbuffer()) < MIB + 12345 + 4096
        del x
        assert torch.load(io.BytesIO(file.getbuffer())).eq(i).all()


def test_the_bound_drops_what_was_used_longest_ago(own):
    first = _new(20 * MIB).fill_(1)
    second = _new(24 * MIB).fill_(2)
    own.take(20 * MIB, (1,), torch.uint8)
    assert own.total == 64 * MIB and own.evicted == 0
    third = _new(30 * MIB).fill_(3)  # the first two are in use: they are dropped, and go on
    assert own.evicted == 2 and own.total == 50 * MIB
    assert first.eq(1).all() and second.eq(2).all() and third.eq(3).all()
    del first, second
    stats = hd.memory.memory_stats()
    assert (stats["in_use_bytes"], stats["idle_bytes"], stats["limit_bytes"]) == (30 * MIB, 20 * MIB, 64 * MIB)
    assert (stats["in_use_blocks"], stats["idle_blocks"]) == (1, 1)
    for x in (_new(65 * MIB), _new(MIB - 1), pool.empty((0, 5), torch.float32, "cpu"), torch.empty(MIB, device="meta")):
        assert x.is_contiguous() and own.total == 50 * MIB  # larger than the pool, or small
    hd.memory.empty_cache()
    assert hd.memory.memory_stats()["idle_bytes"] == 0 and own.total == 30 * MIB and third.eq(3).all()


def test_a_block_does_not_serve_while_the_kernel_frees_it(own, monkeypatch):
    """Another thread may take a block meanwhile: what it writes must not be freed."""
    address, served = _new().data_ptr(), []

    def advise(start, nbytes, advice):
        taken = _new()
        served.append((start, taken.data_ptr()))

    monkeypatch.setattr(pool, "advise", advise)
    own.sweep(0.0)
    assert [start for start, _ in served] == [address]
    assert served[0][1] != address
    later = [_new(), _new()]
    assert address in [x.data_ptr() for x in later]


def test_the_kernel_takes_what_is_idle(own):
    """After some seconds its pages become ones that the kernel can take, and those in use stay what they are."""
    used, idle = _new(16 * MIB).fill_(1), _new(8 * MIB).fill_(2)
    before = _lazy()
    del idle
    assert own.sweep(1000.0) and _lazy() == before
    own.sweep(0.0)
    assert _lazy() - before > 6 * MIB and used.eq(1).all()
    again = _new(8 * MIB).fill_(3)
    assert _lazy() - before < 2 * MIB and again.eq(3).all() and own.reused == 1


def _lazy():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("LazyFree")]
    return int(found.split()[1]) * 1024


def test_memory_that_is_short(own, monkeypatch):
    """The idle blocks are freed before it is an error."""
    _new(8 * MIB), _new(4 * MIB)
    real, room = pool.PoolBlock.__init__, [False, True]

    def scarce(block, nbytes, size):
        if not room.pop(0):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        real(block, nbytes, size)

    monkeypatch.setattr(pool.PoolBlock, "__init__", scarce)
    assert _new(16 * MIB).numel() == 16 * MIB
    assert own.total == 16 * MIB and own.stats()["num_alloc_retries"] == 1
    room[:] = [False, False]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        _new(32 * MIB)
    room[:] = [True]
    assert _new(32 * MIB).numel() == 32 * MIB


def test_a_torch_that_counts_otherwise(monkeypatch):
    numbers = itertools.count()
    for count in (lambda handle: next(numbers), None):
        pool.problem.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch_names, "references_of_storage", count)
            patch.setattr(pool, "current", made := pool.Pool(64 * MIB))
            assert "count" in made.problem
            x = _new(2 * MIB)
            assert x.numel() == 2 * MIB and hd.memory.memory_stats()["num_allocations"] == 0
            assert "count" in str(hd.memory.memory_stats()["problem"])
    pool.problem.cache_clear()
    assert pool.problem() == ""


def test_the_limit():
    assert pool.limit_of(None, 2**30) == pool.limit_of("", 2**30) == 2**27
    assert [pool.limit_of(text, 1) for text in ("0", "100", "2G", "512MiB")] == [0, 100, 2**31, 2**29]
    for text in ("-1", "much", "1.5G", "9" * 30):
        with pytest.raises(ValueError, match="HPCDIST_CACHE"):
            pool.limit_of(text, 1)
    assert machine.parse("64k") == 2**16


# --- results ---------------------------------------------------------------------------------------------------------


def _shard(rank, i):
    """Of call i."""
    return (torch.arange(MIB // 4 * (rank + 1)) + 10**7 * rank + 10**9 * i).view(-1, 16)


def _calls(world, folder):
    """(make the result of call i, what it must be)."""
    rank, size = world.rank, world.world_size
    mine, before = partial(_shard, rank), (rank - 1) % size

    def whole(i):
        return torch.cat([_shard(r, i) for r in range(size)])

    def passed_on(i):
        sent = hd.isend(mine(i), (rank + 1) % size)
        got = hd.recv(before)
        sent.wait(60)
        return got

    counts = [MIB // 64 * (r + 1) for r in range(size)]
    for i in range(CALLS):
        hd.staging.save(folder / f"{i}.h5", mine(i))
    return {
        "concat, dim 1": (lambda i: hd.concat(mine(i).t(), 1), lambda i: whole(i).t()),
        "async": (lambda i: hd.concat(mine(i), async_op=True).wait(60), whole),
        "gather": (lambda i: hd.gather(mine(i)), lambda i: None if rank else whole(i)),
        "split": (lambda i: hd.split(None if rank else whole(i), counts=counts), mine),
        "redistribute": (
            lambda i: hd.redistribute(mine(i), hd.Split(0), hd.Split(1)),
            lambda i: hd.local(whole(i), hd.Split(1)),
        ),
        "structures": (lambda i: hd.concat({"x": mine(i)})["x"], whole),
        "recv": (passed_on, lambda i: _shard(before, i)),
        "load": (lambda i: hd.staging.load(folder / f"{i}.h5"), lambda i: hd.local(whole(i), hd.Split(0))),
    }


@pytest.mark.parametrize("held", [1, 3])
def test_results_of_repeated_calls(findings, world, folder, held):
    """While earlier ones are held."""
    hd.memory.empty_cache()
    before = hd.memory.memory_stats()["num_reuses"]
    for name, (call, want) in _calls(world, folder).items():
        results = []
        for i in range(CALLS):
            results = [*results, (i, call(i))][-held:]
            for j, result in results:
                expected = want(j)
                right = result is None if expected is None else torch.equal(result, expected)
                findings.check(right, f"{name}: result {j} after call {i}")
    findings.check(hd.memory.memory_stats()["num_reuses"] > before, hd.memory.memory_stats())


def test_the_watching_thread_sweeps(findings):
    hd.memory.empty_cache()
    for _ in range(2):
        hd.concat(torch.ones(2 * MIB, dtype=torch.uint8))
    findings.check(hd.memory.memory_stats()["idle_bytes"], hd.memory.memory_stats())
    end = time.monotonic() + 60
    idle = [block for block in _pool()._blocks if block.is_idle()]
    while time.monotonic() < end and not all(block.lazy for block in idle):
        time.sleep(0.1)
    stats = hd.memory.memory_stats()
    findings.check(idle and all(block.lazy for block in idle), stats)
    findings.check(stats["problem"] == "", stats)
