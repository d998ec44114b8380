"""Tensor <-> message, on one process."""

import numpy as np
import pytest
import torch
from cases import DTYPES, STRIDES, same_bits, whole_of

from hpcdist.tensors.blocks import blocks
from hpcdist.tensors.storage import Scratch, as_bytes, overlap, row_major

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


def test_overlap():
    """Arrays of NumPy that share memory become tensors whose storages start at different addresses."""
    x, memory = torch.arange(10), np.arange(10)
    first, later = torch.from_numpy(memory[:6]), torch.from_numpy(memory[4:])
    for a, b in ((x, x[3:5]), (x[3:5], x), (first, later)):
        assert overlap(a, b)
    for a, b in ((x, x.clone()), (x[:0], x), (first[:4], later)):
        assert not overlap(a, b)


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
