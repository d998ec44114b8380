"""Tensor <-> message, on one process."""

import numpy as np
import pytest
import torch
from cases import DTYPES, EXTENTS, STRIDES, extents_of, part, same_bits, starts, strides_for, whole_of

from hpcdist.tensors.blocks import blocks
from hpcdist.tensors.storage import Scratch, as_bytes, overlap, resolved, row_major

SHAPES = [(4,), (4, 3), (2, 4, 3), (2, 3, 4, 2), (1, 4), (0, 4), (4, 0), (4, 1, 1)]
CPU = torch.device("cpu")


def test_every_dtype_travels_but_the_quantized():
    """Their values depend on a scale beside the memory."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = {str(dtype) for dtype in every - set(DTYPES)}
    assert all(name.startswith(("torch.q", "torch.quint")) for name in left_out), left_out


def test_the_number_of_a_dtype_never_changes():
    """Ranks, and processes, may run different versions of torch and of hpcdist."""
    numbers = {str(dtype).removeprefix("torch."): number for dtype, number in DTYPES.items()}
    known = {"float64": 0, "bfloat16": 3, "float8_e8m0fnu": 8, "int64": 9, "bool": 17, "complex32": 20}
    later = {"float4_e2m1fn_x2": 21, "bits8": 22, "bits4x2": 26, "int1": 27, "int7": 33, "uint1": 34, "bcomplex32": 41}
    wanted = {name: number for name, number in (known | later).items() if name in numbers}
    assert {name: numbers[name] for name in wanted} == wanted
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_major_is_x_or_a_copy_in_row_major_order(dtype):
    """clone() alone keeps the order of the strides, and what is sent is the memory as it is."""
    for name in ("contiguous", "transposed", "stepped", "expanded"):
        x = STRIDES[name](whole_of((3, 4), dtype))
        for out in (None, x, torch.empty(5)):
            found = row_major(x, out)
            flat = as_bytes(found.view(dtype))
            assert found.is_contiguous() and flat.data_ptr() == found.data_ptr()
            assert flat.dtype == torch.uint8 and flat.shape == (12 * dtype.itemsize,)
            assert same_bits(found.view(dtype), x)
            assert (found.data_ptr() == x.data_ptr()) == (name == "contiguous" and out is not x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex32, torch.bool], ids=str)
def test_plain_keeps_the_values_without_their_history(dtype):
    for name in strides_for(dtype):
        x = STRIDES[name](whole_of((3, 4), dtype))
        y = resolved(x)
        assert same_bits(y, x) and not y.is_conj() and not y.is_neg(), name
        assert (y.data_ptr() == x.data_ptr()) == (not x.is_conj() and not x.is_neg()), name
    leaf = torch.ones(3, requires_grad=True)
    assert not resolved(leaf).requires_grad and not resolved(leaf * 2).requires_grad


def test_overlap():
    """Arrays of NumPy that share memory become tensors whose storages start at different addresses."""
    x, memory = torch.arange(10), np.arange(10)
    first, later = torch.from_numpy(memory[:6]), torch.from_numpy(memory[4:])
    for a, b in ((x, x[3:5]), (x[3:5], x), (first, later)):
        assert overlap(a, b)
    for a, b in ((x, x.clone()), (x[:0], x), (first[:4], later)):
        assert not overlap(a, b)


@pytest.mark.parametrize("case", EXTENTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_against_plain_indexing(case, size):
    """pack() makes the messages that plain indexing gives; recv_buffer() and unpack() reverse it."""
    extents = extents_of(case, size)
    for shape in SHAPES:
        for dim in range(len(shape)):
            whole = whole_of((*shape[:dim], sum(extents), *shape[dim + 1 :]), torch.float32)
            shards = [part(whole, dim, extents, rank) for rank in range(size)]
            cut = blocks(shape, dim, extents, torch.float32)
            assert cut.shape == whole.shape
            assert cut.counts == [shard.nbytes for shard in shards]
            assert cut.displs == starts(tuple(cut.counts))
            assert cut.nbytes == whole.nbytes
            messages = torch.cat([as_bytes(shard.contiguous()) for shard in shards])
            assert torch.equal(as_bytes(cut.pack(whole)), messages)
            assert torch.equal(as_bytes(cut.pack(STRIDES["transposed"](whole))), messages)
            outs = [None, torch.empty_like(whole), STRIDES["transposed"](torch.empty_like(whole))]
            for out in outs:
                result, landing = cut.recv_buffer(out, CPU)
                as_bytes(landing).copy_(messages)
                cut.unpack(landing, result)
                assert same_bits(result, whole), (shape, dim, extents)
                assert out is None or result is out
            for rank, shard in enumerate(shards):
                memory = torch.empty(cut.boxes[rank][0].shape, dtype=cut.dtype)
                assert (memory.shape, memory.dtype) == (shard.shape, shard.dtype)
                assert memory.is_contiguous()


def test_no_copy_where_the_messages_are_the_whole():
    whole = whole_of((6, 4), torch.int32)
    joined = blocks((2, 4), 0, (2, 4), torch.int32)
    assert joined.pack(whole).data_ptr() == whole.data_ptr()
    result, landing = joined.recv_buffer(None, CPU)
    assert landing is result
    one_holds_all = blocks((6, 4), 1, (0, 4), torch.int32)
    assert one_holds_all.pack(whole).data_ptr() == whole.data_ptr()
    across = blocks((6, 1), 1, (1, 3), torch.int32)
    assert across.pack(whole).data_ptr() != whole.data_ptr()


def test_blocks_beyond_an_int():
    """Counts and displacements are exact where an int32 or int64 product of shapes could wrap."""
    cut = blocks((1, 2**20), 0, (2**15, 2**15, 2**15), torch.float64)
    assert cut.counts == [2**38] * 3
    assert cut.displs == [0, 2**38, 2**39]
    assert cut.nbytes == 3 * 2**38


def test_scratch_memory_is_used_again():
    scratch, first = Scratch(pinned=False), []
    for shape in ((3, 4), (2, 2), (4, 4)):
        scratch.reset()
        one, other = scratch.take(shape, torch.int16), scratch.take((5,), torch.float64)
        assert (one.shape, one.dtype) == (shape, torch.int16)
        first.append(other.data_ptr())
        x = torch.arange(6).view(2, 3)
        assert scratch.on_host(x) is x
        assert scratch.on_host(x.t()).view(-1).tolist() == [0, 3, 1, 4, 2, 5]
    assert len(set(first)) == 1
