"""Parts in any layout through torch's own dcp.save and dcp.load, from torch 2.14 on; and the error before."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import same_bits, whole_of
from collective import Findings, raises_on_all_ranks
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


def layouts_of(shape: tuple[int, ...], size: int) -> list[hd.Layout]:
    """Of every kind: ragged, with empty parts, of several dims, copies, boxes that overlap."""
    found: list[hd.Layout] = [hd.Replicate()]
    for dim, extent in enumerate(shape):
        first = [0] * size
        first[size // 2] = extent
        ragged = hd.balance([1.0 + 3 * (i % 2) for i in range(extent)], size) if extent else first
        found += [hd.Split(dim), hd.Split(dim, "chunk"), hd.Split(dim, first), hd.Split(dim, ragged)]
    if len(shape) > 1:
        found.append(hd.Block((1, size), (0, 1)))
        if size % 2 == 0:
            found += [hd.Block((2, size // 2), (0, 1)), hd.Block((2, size // 2), (1, None), order="column")]
    if shape and shape[0] >= size:
        starts = [shape[0] * rank // size for rank in range(size + 1)]
        halos = [(max(0, a - 1), min(shape[0], b + 2)) for a, b in pairwise(starts)]
        found.append(hd.Boxes([((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in halos]))
    return found


@new
@pytest.mark.parametrize("storage", ["folder", "HDF5"])
def test_every_layout_to_every_other(storage: str, world: hd.World, folder: Path) -> None:
    findings, size = Findings(world.comm), world.world_size
    wholes = {name: whole_of(shape, torch.float32, k) for k, (name, shape) in enumerate(SHAPES.items())}
    pairs = {}
    for name, shape in SHAPES.items():
        choices = layouts_of(shape, size)
        pairs |= {f"{name}.{k}": (name, src, choices[(3 * k + 1) % len(choices)]) for k, src in enumerate(choices)}
    state: dict[str, Any] = {}
    for key, (name, src, _) in pairs.items():
        state[key] = hd.checkpointable(hd.local(wholes[name], src).clone(), src)
    path = str(folder / "x.h5") if storage == "HDF5" else str(folder / "x")
    to: Any = HDF5Writer(path, window=100) if storage == "HDF5" else dcp.FileSystemWriter(path)
    dcp.save({"state": state, "step": 3}, storage_writer=to)
    parts = {key: torch.full_like(hd.local(wholes[name], dst), -1) for key, (name, _, dst) in pairs.items()}
    wanted: Any = {key: hd.checkpointable(parts[key], dst) for key, (_, _, dst) in pairs.items()}
    loaded = {"state": wanted, "step": 0}
    dcp.load(loaded, storage_reader=HDF5Reader(path) if storage == "HDF5" else dcp.FileSystemReader(path))
    findings.check(loaded["step"] == 3, loaded["step"])
    for key, (name, src, dst) in pairs.items():
        findings.same(parts[key], hd.local(wholes[name], dst).contiguous(), f"{key}: {src} to {dst}")
    world.comm.Barrier()
    if world.rank == 0 and storage == "folder":  # by torch alone, on one process
        dcp_to_torch_save(path, folder / "x.pt")
        whole = torch.load(folder / "x.pt")["state"]
        findings.check(all(same_bits(whole[key], wholes[name]) for key, (name, _, _) in pairs.items()), "torch.load")
    elif world.rank == 0:
        with h5py.File(path) as file:
            for key, (name, _, _) in pairs.items():
                same = file[f"state.{key}"][()].tobytes() == wholes[name].numpy().tobytes()
                findings.check(same, f"{key} in the file")
    findings.settle()


@new
def test_the_memory_is_shared_and_async_save_keeps_the_parts(world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    whole = whole_of((4 * world.world_size + 1, 6), torch.float32)
    x = hd.local(whole, hd.Split(0)).clone().requires_grad_()
    described = hd.checkpointable(x, hd.Split(0))
    findings.check(described.data_ptr() == x.data_ptr() and not described.requires_grad, "the memory of x")
    dcp.async_save({"x": described}, checkpoint_id=folder / "x").result()  # type: ignore[union-attr]
    dcp.async_save({"x": described}, storage_writer=HDF5Writer(folder / "x.h5")).result()  # type: ignore[union-attr]
    columns = hd.local(whole, hd.Split(1)).t().contiguous().t()  # strided
    found = torch.zeros_like(columns)
    dcp.load({"x": hd.checkpointable(found, hd.Split(1))}, checkpoint_id=folder / "x")
    findings.same(found.contiguous(), columns.contiguous(), "after async_save")
    findings.same(hd.staging.load(folder / "x.h5", "x", dim=1), columns.contiguous(), "after async_save to HDF5")
    findings.settle()


@new
def test_refusals(world: hd.World) -> None:
    findings, x = Findings(world.comm), torch.ones(2, 3)
    last = world.rank == world.world_size - 1
    wrong: list[tuple[Any, Any, str]] = [
        (x, "rows", "layout must be one of Split, Block, Replicate and Boxes, got 'rows'"),
        ([1.0], hd.Split(0), "x must be a torch.Tensor"),
        (x, hd.Split(2), "dim 2 cannot be cut"),
        (x, hd.Split(0, [1] * world.world_size), "counts add up to"),
        (x, hd.Boxes([((5, 0), (2, 3))] * world.world_size), "the boxes leave gaps"),
        (torch.ones(2, 3, dtype=torch.complex64).conj(), hd.Split(0), "conjugate or negative"),
    ]
    if world.world_size > 1:
        wrong += [
            (x, hd.Split(1 if last else 0), "layout is Split"),
            (x.double() if last else x, hd.Split(0), "dtype is torch.float64"),
            (x[0] if last else x, hd.Split(0), "different numbers of dims"),
            (torch.ones(2, 4 if last else 3), hd.Split(0), "holds a part of shape (2, "),
        ]
    for given, layout, message in wrong:
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda g=given, k=layout: hd.checkpointable(g, k))
        findings.check(message in str(error), error)
    findings.settle()


@older
def test_an_older_torch_is_told(world: hd.World) -> None:
    text = rf"needs torch 2\.14 or later.*, and this is {torch.__version__.split('+')[0]}.*staging\.save"
    with pytest.raises(NotImplementedError, match=text):
        hd.checkpointable(torch.ones(2), hd.Split(0))
