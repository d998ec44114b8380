"""Tensor <-> message, on one process."""

import torch
from cases import DTYPES, whole_of

from hpcdist.tensors.blocks import blocks

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
