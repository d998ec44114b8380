"""Is this argument right on this rank: what check_shard and check_split find, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Index

from hpcdist.collectives.join import Join
from hpcdist.collectives.split import Scatter
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.validation.call import Call
from hpcdist.validation.local import call_of, check_split


class _Wrapper(torch.Tensor):
    """A tensor that is only a description of others, like a DTensor."""

    @staticmethod
    def __new__(cls) -> _Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)
        assert isinstance(wrapper, cls)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _team(rank: int) -> Any:
    """As much of a team of two as the checks look at."""
    return SimpleNamespace(rank=rank, size=2, inline=0)


def _concat(x: Any, dim: Any = 0, route: Any = "auto", out: Any = None) -> Call:
    return call_of("concat", Join("concat", x, dim, route, out, False).validate, _team(0))


def _gather(root: Any = 0, out: Any = None, rank: int = 0) -> Call:
    return call_of("gather", Join("gather", torch.zeros(2, 3), 0, "auto", out, False, root).validate, _team(rank))


def _split(x: Any, dim: Any = 0, root: Any = 0, counts: Any = None, out: Any = None, rank: int = 0) -> Call:
    return call_of("split", check_split, Scatter(x, dim, root, counts, "auto", out, False), rank, 2, False)


def test_a_shard_is_described() -> None:
    call = _concat(torch.zeros(2, 3, 4, dtype=torch.int16), -2)
    assert call.problem is None
    assert (call.dim, call.dim_arg, call.root, call.extent, call.out_extent) == (1, 1, -1, 3, -1)
    assert call.tensor == (torch.int16, 3, (2, -1, 4))
    assert call.kind == MemoryKind.CPU


@pytest.mark.parametrize("dim", [1, -1, np.int64(1), Index(1), torch.tensor(1).item()])
def test_what_counts_as_an_integer(dim: Any) -> None:
    assert _concat(torch.zeros(2, 3), dim).dim == 1
    assert _concat(torch.zeros(2, 3), dim).problem is None
    assert _gather(root=abs(dim) if isinstance(dim, int) else dim).root == 1


@pytest.mark.parametrize("value", [1.0, "0", None, True, [0], torch.tensor(0), np.array([0, 1]), np.array(0.5)])
def test_what_is_no_integer(value: Any) -> None:
    """It becomes the call's problem, so that the other ranks hear of it; nothing is raised here alone."""
    assert "dim must be an int" in str(_concat(torch.zeros(2, 3), value).problem)
    assert "root must be an int" in str(_gather(root=value).problem)
    assert "root must be an int" in str(_split(torch.zeros(2, 3), root=value).problem)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.eye(2).to_sparse(), "got layout torch.sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "got layout torch.sparse_csr"),
        (torch.eye(2).to_mkldnn(), "got layout torch._mkldnn"),
        (torch.nested.nested_tensor([torch.zeros(2)]), "x must be a dense tensor"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "got layout torch.strided (quantized)"),
    ],
    ids=["sparse", "sparse rows", "for MKL-DNN", "nested", "quantized"],
)
def test_what_is_not_dense(x: torch.Tensor, told: str) -> None:
    assert told in str(_concat(x).problem)
    assert told in str(_split(x).problem)


@pytest.mark.parametrize("dim", [2, -3])
def test_what_is_no_dim(dim: int) -> None:
    assert f"dim is {dim}, expected -2 to 1 for a tensor of 2 dims" in str(_concat(torch.zeros(2, 3), dim).problem)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([1, 1, 1, 1], "entries, expected one for each of"),
        ([-1, 3], "counts has a negative entry: [-1"),
        ([1.0, 1.0], "counts must be integers"),
        (2, "counts must be integers"),
    ],
    ids=str,
)
def test_counts_that_do_not_fit(counts: Any, told: str) -> None:
    assert told in str(_split(torch.zeros(2, 3), counts=counts).problem)


@pytest.mark.parametrize("route", ["tcp", "", None, 3, ["mpi"], np.array(["mpi", "gloo"]), torch.zeros(2)])
def test_what_is_no_route(route: Any) -> None:
    assert "expected one of auto, nccl, gloo, mpi" in str(_concat(torch.zeros(2), route=route).problem)


@pytest.mark.parametrize("out", [torch.empty(4, dtype=torch.complex64).conj(), torch.empty(4).neg()._neg_view()])
def test_a_lazy_out_is_refused_or_written_in_place(out: torch.Tensor) -> None:
    """Not a copy of it: the caller looks at `out` for the result."""
    call = _concat(torch.zeros(2, dtype=out.dtype), out=out)
    assert call.problem is not None or (call.out is not None and call.out.data_ptr() == out.data_ptr())


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ([0.0], "out must be a torch.Tensor, got list"),
        (torch.empty(5, 3, dtype=torch.float64), "out has dtype torch.float64, expected torch.float32"),
        (torch.empty(5, 4), r"out has shape (5, 4), expected (*, 3)"),
        (torch.empty(5, 3, 1), r"out has shape (5, 3, 1), expected (*, 3)"),
        (torch.empty(3).expand(5, 3), "out overlaps itself"),
        (torch.empty(20).as_strided((5, 3), (1, 1)), "several of its elements share memory"),
        (torch.empty(20).as_strided((5, 3), (2, 1)), "several of its elements share memory"),
        (torch.empty(5, 3, device="meta"), "out is on device meta"),
        (torch.empty(5, 3).to_sparse(), "out must be a dense tensor, got layout torch.sparse_coo"),
    ],
)
def test_an_out_that_does_not_fit(out: Any, told: str) -> None:
    assert told in str(_concat(torch.zeros(2, 3), out=out).problem)
    assert told in str(_gather(out=out).problem)


def test_an_out_of_fewer_dims_is_told_as_such() -> None:
    """And not as a wrong dim, which is right for x."""
    assert "out has shape (5,), expected (2, *)" in str(_concat(torch.zeros(2, 3), 1, out=torch.empty(5)).problem)


def test_an_out_of_inference_mode_is_refused_outside_of_it() -> None:
    """It could not be written, and that would show in the middle of a transfer."""
    with torch.inference_mode():
        out = torch.empty(4, 3)
        assert _concat(torch.zeros(2, 3), out=out).problem is None
    assert "inference_mode" in str(_concat(torch.zeros(2, 3), out=out).problem)
    assert "inference_mode" in str(_split(None, out=out, rank=1).problem)


@pytest.mark.parametrize("x", [_Wrapper(), torch._efficientzerotensor((3,))], ids=["wrapper", "zero tensor"])
def test_a_tensor_without_memory_of_its_own(x: torch.Tensor) -> None:
    """There is nothing to send, and that would show in the middle of a transfer."""
    assert _concat(x).problem is not None
    assert _concat(torch.zeros(3), out=x).problem is not None


def test_a_receiver_of_split_follows_the_root() -> None:
    call = _split(None, dim=-1, rank=1)
    assert call.problem is None
    assert (call.tensor, call.extent, call.out_extent, call.dim_arg) == (None, -1, -1, -1)
    assert call.kind == MemoryKind.FOLLOWS_CPU
    with_gpu = call_of("split", check_split, Scatter(None, 0, 0, None, "auto", None, False), 1, 2, True)
    assert with_gpu.kind == MemoryKind.FOLLOWS


def test_counts_of_any_kind_of_integer_are_the_same_counts() -> None:
    """They are compared between ranks by what they are, not by how they were written."""
    x = torch.zeros(2, 3)
    for counts in ([1, 1], (1, 1), [True, True], np.array([1, 1]), torch.tensor([1, 1]), [Index(1), np.int8(1)]):
        assert repr(_split(x, counts=counts).counts) == "(1, 1)"


def test_a_communicator_in_the_place_of_dim_is_told_its_keyword() -> None:
    comm = type("Intracomm", (), {"__module__": "mpi4py.MPI"})()
    problem = _concat(torch.zeros(2), dim=comm).problem
    assert problem is not None and problem.startswith("dim must be an int, got Intracomm"), problem
    assert "(a communicator is given as group=)" in problem
