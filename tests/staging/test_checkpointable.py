"""Parts in any layout through torch's own dcp.save and dcp.load, from torch 2.14 on; and the error before."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import whole_of
from collective import Findings
from conftest import refused
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hpcdist as hd
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

pytestmark = pytest.mark.mpi

NEW = find_spec("torch.distributed.checkpoint.protocol") is not None


def new(test: Any) -> Any:
    """Keep a test with torch 2.14 and later: what an older torch cannot run is no test there."""
    return test if NEW else None


def older(test: Any) -> Any:
    """Keep a test with older torches."""
    return None if NEW else test


SHAPES = {"a": (13, 7), "b": (6, 9, 4), "c": (5,), "none": (0, 3), "row": (1, 8), "scalar": ()}


def layouts_of(shape: tuple[int, ...], size: int) -> list[hd.layout.Layout]:
    """Of every kind: ragged, with empty parts, of several dims, copies, boxes in another order than the ranks."""
    found: list[hd.layout.Layout] = [hd.Replicate()]
    for dim, extent in enumerate(shape):
        one = [extent * (rank == size // 2) for rank in range(size)]
        ragged = hd.balance([1.0 + 3 * (i % 2) for i in range(extent)], size) if extent else one
        found += [hd.Split(dim, counts) for counts in (None, "chunk", one, ragged)]
    if len(shape) > 1:
        found.append(hd.Block((1, size), (0, 1)))
        if size % 2 == 0:
            found += [hd.Block((2, size // 2), (0, 1)), hd.Block((2, size // 2), (1, None), order="column")]
    if shape and shape[0] >= size:
        ends = [(shape[0] * r // size, shape[0] * (r + 1) // size) for r in reversed(range(size))]
        found.append(hd.Boxes([((a, *[0] * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in ends]))
    return found


@new
@pytest.mark.parametrize("storage", ["folder", "HDF5"])
def test_every_layout_to_every_other(storage: str, findings: Findings, world: hd.World, folder: Path) -> None:
    path = folder / "x.h5" if storage == "HDF5" else folder / "x"
    wholes = {name: whole_of(shape, torch.float32, k) for k, (name, shape) in enumerate(SHAPES.items())}
    pairs = {}
    for name, shape in SHAPES.items():
        choices = layouts_of(shape, world.world_size)
        pairs |= {f"{name}.{k}": (name, src, choices[(3 * k + 1) % len(choices)]) for k, src in enumerate(choices)}
    state = {key: hd.checkpointable(hd.local(wholes[of], src).clone(), src) for key, (of, src, _) in pairs.items()}
    to: Any = HDF5Writer(path, window=100) if storage == "HDF5" else dcp.FileSystemWriter(path)
    dcp.save({"state": state, "step": 3}, storage_writer=to)
    parts = {key: torch.full_like(hd.local(wholes[of], dst), -1) for key, (of, _, dst) in pairs.items()}
    loaded = {"state": {key: hd.checkpointable(parts[key], pairs[key][2]) for key in pairs}, "step": 0}
    dcp.load(loaded, storage_reader=HDF5Reader(path) if storage == "HDF5" else dcp.FileSystemReader(path))
    findings.check(loaded["step"] == 3, loaded["step"])
    for key, (of, src, dst) in pairs.items():
        findings.same(parts[key], hd.local(wholes[of], dst).contiguous(), f"{key}: {src} to {dst}")
    world.comm.Barrier()
    if world.rank == 0 and storage == "folder":  # by torch alone, on one process
        dcp_to_torch_save(path, folder / "x.pt")
        whole = torch.load(folder / "x.pt")["state"]
    elif world.rank == 0:
        with h5py.File(path) as file:
            whole = {key: torch.as_tensor(file[f"state.{key}"][()]) for key in pairs}
    if world.rank == 0:
        for key, (of, _, _) in pairs.items():
            findings.same(whole[key], wholes[of], f"{key} by another program")


@new
def test_the_memory_is_shared_and_async_save_keeps_the_parts(findings: Findings, world: hd.World, folder: Path) -> None:
    rows, columns = hd.Split(0), hd.Split(1)
    whole = whole_of((4 * world.world_size + 1, 6), torch.float32)
    x = hd.local(whole, rows).clone().requires_grad_()
    described, expected = hd.checkpointable(x, rows), hd.local(whole, columns).contiguous()
    findings.check(described.data_ptr() == x.data_ptr() and not described.requires_grad, "the memory of x")
    for options in ({"checkpoint_id": folder / "x"}, {"storage_writer": HDF5Writer(folder / "x.h5")}):
        dcp.async_save({"x": described}, **options).result()  # type: ignore[union-attr]
    found = torch.zeros_like(expected).t().contiguous().t()  # strided
    dcp.load({"x": hd.checkpointable(found, columns)}, checkpoint_id=folder / "x")
    findings.same(found.contiguous(), expected, "after async_save")
    findings.same(hd.staging.load(folder / "x.h5", "x", dim=1), expected, "after async_save to HDF5")


@new
def test_refusals(world: hd.World) -> None:
    x, last, size = torch.ones(2, 3), world.rank == world.world_size - 1, world.world_size
    wrong: list[tuple[Any, Any, str]] = [
        (x, "rows", "layout must be one of Split, Block, Replicate and Boxes, got 'rows'"),
        ([1.0], hd.Split(0), "x must be a torch.Tensor"),
        (x, hd.Split(2), "dim 2 cannot be cut"),
        (x, hd.Split(0, [1] * size), "counts add up to"),
        (x, hd.Boxes([((5, 0), (2, 3))] * size), "overlap, or leave gaps"),
        (torch.ones(2, 3, dtype=torch.complex64).conj(), hd.Split(0), "conjugate or negative"),
    ]
    if size > 1:
        wrong += [
            (x, hd.Boxes([((min(rank, 1), 0), (2, 3)) for rank in range(size)]), "overlap, or leave gaps"),
            (x, hd.Split(1 if last else 0), "layout is Split"),
            (x.double() if last else x, hd.Split(0), "dtype is torch.float64"),
            (x[0] if last else x, hd.Split(0), "different numbers of dims"),
            (torch.ones(2, 4 if last else 3), hd.Split(0), "holds a part of shape (2, "),
        ]
    for given, layout, message in wrong:
        refused(world, message, hd.checkpointable, given, layout)


@older
def test_an_older_torch_is_told(world: hd.World) -> None:
    text = rf"needs torch 2\.14 or later.*, and this is {torch.__version__.split('+')[0]}.*staging\.save"
    with pytest.raises(NotImplementedError, match=text):
        hd.checkpointable(torch.ones(2), hd.Split(0))
