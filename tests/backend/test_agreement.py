"""Ranks whose calls differ: the same error on all of them, before data move, and the job goes on."""

import threading
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from collective import all_gather_single, assert_on_all_ranks, raises_on_all_ranks, reduce_scatter_single, several_ranks

from hpcdist.backend.agreement import ArgumentsError
from hpcdist.errors import RankError
from hpcdist.runtime import registration

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES = [1, 2**14]  # elements: 64 KiB of float32, which MPI sends when the receiver is there
OTHERS = {
    "size": lambda x: torch.ones(len(x) + 1),
    "dtype": lambda x: x.to(torch.float64),
    "dtype of the same width": lambda x: x.to(torch.int32),
}


def _lists(x):
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


def _at_root(x, root):
    return _lists(x) if dist.get_rank() == root else None


def _whole(x):
    return x.repeat(dist.get_world_size())


CALLS = {
    "all_reduce": dist.all_reduce,
    "all_reduce with async_op": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather(_lists(x), x),
    "all_gather_single": lambda x: all_gather_single(_whole(x), x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, _lists(x)),
    "reduce_scatter_single": lambda x: reduce_scatter_single(x.clone(), _whole(x)),
    "gather": lambda x: dist.gather(x, _at_root(x, 0), 0),
    "scatter": lambda x: dist.scatter(x, _at_root(x, 0), 0),
    "all_to_all": lambda x: dist.all_to_all(_lists(x), _lists(x)),
    "all_to_all_single": lambda x: dist.all_to_all_single(_whole(x), _whole(x)),
}


def _goes_on():
    y = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(y)
    assert_on_all_ranks(y.tolist() == [sum(range(dist.get_world_size()))] * 5, y)


def _refused(call):
    error = raises_on_all_ranks(RankError, call)
    assert error.codes == ["HD301"]
    _goes_on()
    return str(error)


@several_ranks
@pytest.mark.parametrize("verb", CALLS)
def test_sizes_and_dtypes(verb, world, last):
    for n in SIZES:
        x = torch.ones(n)
        for odd in OTHERS.values():
            text = _refused(lambda: CALLS[verb](odd(x) if world.rank == last else x.clone()))  # noqa: B023
            name = verb.split()[0]
            named = f"rank {last}: is in {name}() of " in text or "which sends " in text
            assert named, text
            assert text.startswith(f"{name}() was refused on all ranks")
            assert text.count("test_agreement.py:") >= 2, text


SINGLE = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")  # these tests' repeat() takes few kinds
ODD = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    "layout torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(1)]),
    "device meta": lambda: torch.ones(2, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(type("subclass", (torch.Tensor,), {})),
}


if not registration.PLUGINS:  # from torch 2.14 on, its dispatcher answers for these, on that rank alone

    @several_ranks
    @pytest.mark.parametrize("kind", ODD)
    def test_a_tensor_that_cannot_be_sent(kind, world, last):
        """The same for all calls as for the verbs, and on one rank alone."""
        for verb in [verb for verb in CALLS if verb not in SINGLE]:
            for wrong in ([last], range(world.world_size)):
                x = ODD[kind]() if world.rank in wrong else torch.ones(2)
                error = raises_on_all_ranks(RankError, lambda: CALLS[verb](x))  # noqa: B023
                right = error.codes == ["HD202"] and [*error.problems] == [*wrong] and kind in str(error)
                assert_on_all_ranks(right, f"{verb}: {error}")
                _goes_on()


@several_ranks
@pytest.mark.parametrize("n", SIZES)
def test_every_two_operations(n, world):
    verbs = [verb for verb in CALLS if "async" not in verb] + ["barrier"]
    for one, another in permutations(verbs, 2):
        mine = another if world.rank == 1 else one
        x = torch.ones(n)
        call = dist.barrier if mine == "barrier" else lambda: CALLS[mine](x)  # noqa: B023
        text = _refused(call)
        assert text.startswith(f"{one}() was refused on all ranks\n  rank 1: is in {another}() "), text
        assert f", and rank 0 in {one}() " in text
        assert torch.equal(x, torch.ones(n))


@several_ranks
@pytest.mark.parametrize("n", SIZES)
def test_operations_and_roots(n, world):
    x, odd = torch.ones(n), world.rank == 1
    op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
    assert f"rank 1: is in all_reduce() of {n} x torch.float32, MAX at " in _refused(lambda: dist.all_reduce(x, op))
    assert f"rank 1: is in broadcast() of {n} x torch.float32, root 1 at " in _refused(
        lambda: dist.broadcast(x, int(odd))
    )
    assert "of torch.float32, root 1 at " in _refused(lambda: dist.gather(x, _at_root(x, int(odd)), int(odd)))
    assert "of torch.float32, root 1 at " in _refused(lambda: dist.scatter(x, _at_root(x, int(odd)), int(odd)))
    assert torch.equal(x, torch.ones(n))


@several_ranks
def test_sizes_of_every_pair_of_ranks(rank, size):
    """One of them is not right, also where the sums of all are the same: see test_operations.py for right ones."""
    splits = [[1 + (source + dest) % 3 for dest in range(size)] for source in range(size)]
    sent, expected = splits[rank], [splits[source][rank] for source in range(size)]
    if rank == 0:  # as many rows as before, for other ranks
        sent = [sent[0] + 1, sent[1] - 1, *sent[2:]]
    x = torch.zeros(sum(sent), 2)
    own = [sent[0] if rank == 0 else expected[0], *expected[1:]]
    text = _refused(lambda: dist.all_to_all_single(torch.zeros(sum(own), 2), x, own, sent))
    assert "rank 1: expects " in text
    assert "from rank 0, which sends " in text


@pytest.mark.mpi(min_size=3)
def test_ranks_are_those_of_the_group_which_is_named(world, rank):
    ranks = [0, world.world_size - 1]
    group = dist.new_group(ranks)
    named = f"; in the group of world ranks 0, {ranks[1]} [HD301]"
    text = named
    if rank in ranks:
        with pytest.raises(RankError) as raised:
            dist.broadcast(torch.ones(3), rank, group)
        text = str(raised.value)
        dist.destroy_process_group(group)
    assert_on_all_ranks(named in text, text)


@several_ranks
def test_a_long_list_is_shown_where_it_differs(world):
    xs = [torch.ones(2) for _ in range(50)]
    if world.rank == 1:
        xs[40] = torch.ones(3)
    text = _refused(lambda: dist.all_reduce_coalesced(xs))
    assert "rank 1: is in all_reduce_coalesced() of 40 tensors, 3 x torch.float32, 2 x" in text


@several_ranks
def test_threads_that_call_in_different_order(rank):
    group = dist.new_group()
    calls = [lambda: dist.all_reduce(torch.ones(3), group=group), lambda: dist.broadcast(torch.ones(4), 0, group)]
    said = []

    ended = [threading.Event(), threading.Event()]

    def call(number):
        try:
            calls[number]()
        except RankError as error:
            said.append(str(error))
        ended[number].set()
        ended[1 - number].wait(60)  # else the second thread could get the number of the first

    threads = [threading.Thread(target=call, args=((turn + rank) % 2,)) for turn in (0, 1)]
    for turn, thread in enumerate(threads):
        thread.start()
        ended[(turn + rank) % 2].wait(60)
    for thread in threads:
        thread.join()
    assert_on_all_ranks(len(said) == 2, said)
    dist.destroy_process_group(group)


@several_ranks
def test_a_result_needs_a_place_for_each_element(size):
    for call in (lambda x: dist.all_reduce(x), lambda x: dist.all_gather([x] * size, torch.ones(4))):
        with pytest.raises(ValueError, match=r"lie in one place, as from expand"):
            call(torch.zeros(1).expand(4))
    out = torch.zeros(size, 4)
    dist.all_gather(list(out), torch.ones(1).expand(4))  # what is sent may be
    assert_on_all_ranks(bool((out == 1).all()), out)


WRONG = {  # what one rank does, given the number of ranks, and the code of the error
    "a list too long": (lambda n: dist.all_gather([*torch.ones(n + 1, 2)], torch.ones(2)), "HD701"),
    "too many elements": (lambda n: all_gather_single(torch.ones(2 * n + 1), torch.ones(2)), "HD701"),
    "splits": (lambda n: dist.all_to_all_single(torch.ones(n), torch.ones(n), [2] * n, [1] * n), "HD701"),
    "one place": (lambda n: dist.all_reduce(torch.ones(1).expand(4)), "HD202"),
    "an operation": (lambda n: dist.all_reduce(torch.ones(4), dist.ReduceOp.BOR), "HD701"),
    "an average of bools": (lambda n: dist.all_reduce(torch.ones(2) > 0, dist.ReduceOp.AVG), "HD701"),
    "another dtype": (lambda n: all_gather_single(torch.ones(2 * n, dtype=torch.int32), torch.ones(2)), "HD701"),
    "a list too long to reduce": (lambda n: dist.reduce_scatter(torch.ones(2), [*torch.ones(n + 1, 2)]), "HD701"),
}


@several_ranks
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("wait", [False, True])
def test_a_wrong_argument_of_one_rank_is_the_same_error_on_all(wrong, wait, rank, size):
    call, code = WRONG[wrong]
    if rank != size - 1:
        call = (lambda n: dist.barrier(async_op=True).wait()) if wait else lambda n: dist.all_reduce(torch.ones(4))
    with pytest.raises(ArgumentsError) as raised:
        call(size)
    error = raised.value
    same = isinstance(error, ValueError) and error.codes == [code] and [*error.problems] == [size - 1]
    assert_on_all_ranks(same, error)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert_on_all_ranks(x.item() == size, x)


@several_ranks
def test_what_a_rank_does_not_write_needs_none(rank, size):
    for root in range(size):
        one, whole = torch.full((1,), 1.0 + rank), torch.full((4,), 1.0 + rank)
        sent = one.expand(4) if rank == root else whole
        dist.broadcast(sent, root)
        assert_on_all_ranks(sent.tolist() == [1.0 + root] * 4, sent)
        mine = whole.fill_(1.0) if rank == root else one.fill_(1.0).expand(4)
        dist.reduce(mine, root)
        assert_on_all_ranks(mine.tolist() == [size if rank == root else 1.0] * 4, mine)


@several_ranks
def test_also_in_torchs_own_wrapper(rank, size):
    """That of TORCH_DISTRIBUTED_DEBUG=DETAIL, which from torch 2.14 on compares, in its own words."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level(level)
    splits = [1 + (rank == 1), *[1] * (size - 1)]
    for call in (
        lambda x: dist.all_reduce(x, group=group),
        lambda x: dist.gather(x, [torch.ones(1)] * size if rank == 0 else None, group=group),
        lambda x: dist.all_to_all_single(torch.ones(size), torch.ones(sum(splits)), [1] * size, splits, group=group),
    ):
        with pytest.raises(RuntimeError, match=r"HD301|Detected mismatch between collectives"):
            call(torch.ones(1 + (rank == 1)))
    outs = [torch.empty(1 + i) for i in range(size)]  # uneven, and right
    dist.all_gather(outs, torch.full((1 + rank,), float(rank)), group=group)
    dist.all_to_all_single(torch.empty(0), torch.ones(0), group=group)
    assert_on_all_ranks([out[-1].item() for out in outs] == [*range(size)], outs)
    dist.destroy_process_group(group)
