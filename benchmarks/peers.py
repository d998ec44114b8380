"""Common hand-written implementations of gather, concat and split. Each is correct for ragged shards.

Each takes a shards.Case and returns the result on this rank, or None. Only the preallocated mpi4py ones have the counts
of all ranks in advance; the others must exchange them, as a program must. All shards are 1-d and of one dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

if TYPE_CHECKING:
    from shards import Case

ROOT = 0
# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)


# Helpers


def _sizes_of_all(x: Tensor) -> list[int]:
    """Gather the number of rows of every rank's shard, by an all_gather of one integer."""
    mine = torch.tensor([len(x)])
    sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, mine)
    return [int(size) for size in sizes]


def _sizes_from_root(counts: list[int]) -> list[int]:
    """Broadcast the number of rows of every rank's part from the root."""
    sizes = torch.tensor(counts) if dist.get_rank() == ROOT else torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.broadcast(sizes, ROOT)
    return [int(size) for size in sizes]


def _pad(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else torch.cat([x, x.new_empty(rows - len(x))])


def _send_to_root(x: Tensor, buffers: Sequence[Tensor]) -> None:
    """Send to the root, which receives the shards in `buffers` (on the root), in rank order."""
    if dist.get_rank() != ROOT:
        works = [dist.isend(x, ROOT)]
    else:
        works = [dist.irecv(buffer, rank) for rank, buffer in enumerate(buffers) if rank != ROOT]
        buffers[ROOT].copy_(x)
    _wait(works)


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:  # None for a rank outside the group
            work.wait()


# concat


def concat_mpi4py(case: Case) -> Tensor | None:
    """The baseline: mpi4py as in its tutorial for arrays: Allgatherv into preallocated memory, counts known."""
    case.comm.Allgatherv(case.send, case.recv)
    return case.out


def concat_mpi4py_new(case: Case) -> Tensor:
    """mpi4py, into a new tensor each time; the counts are exchanged first, with the lower-case call."""
    counts = case.comm.allgather(len(case.shard))
    out = torch.empty(sum(counts), dtype=case.shard.dtype)
    case.comm.Allgatherv([case.shard.numpy(), MPI.INT64_T], [out.numpy(), counts, MPI.INT64_T])
    return out


def concat_mpi4py_pickle(case: Case) -> Tensor:
    """mpi4py's lower-case call, which pickles the tensors."""
    return torch.cat(case.comm.allgather(case.shard))


def concat_gloo_padded(case: Case) -> Tensor:
    """Exchange sizes, pad to the largest, all_gather into a list, trim, cat: torchmetrics' gather_all_tensors, and
    the usual answer on the PyTorch forum (discuss.pytorch.org, topic 44819)."""
    sizes = _sizes_of_all(case.shard)
    padded = _pad(case.shard, max(sizes))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def concat_gloo_into_tensor(case: Case) -> Tensor:
    """all_reduce of the sizes, pad to the largest, all_gather_into_tensor, trim if ragged: as accelerate's
    pad_across_processes and gather, whose users trim themselves."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(case.shard)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    whole = case.shard.new_empty(len(sizes) * longest)
    dist.all_gather_into_tensor(whole, _pad(case.shard, longest))
    if int(sizes.min()) == longest:
        return whole
    rows = whole.view(-1, longest)
    return torch.cat([row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)])


def concat_gloo_by_root(case: Case) -> Tensor:
    """Send unpadded shards to the root, and broadcast the whole from there."""
    sizes = _sizes_of_all(case.shard)
    whole = case.shard.new_empty(sum(sizes))
    _send_to_root(case.shard, torch.split(whole, sizes))
    dist.broadcast(whole, ROOT)
    return whole


def concat_gloo_object(case: Case) -> Tensor:
    """all_gather_object: torch pickles, pads and unpickles; as in detectron2 and many evaluation loops."""
    parts: list[Tensor] = [case.shard] * dist.get_world_size()
    dist.all_gather_object(parts, case.shard)
    return torch.cat(parts)


# gather


def gather_mpi4py(case: Case) -> Tensor | None:
    """The baseline: mpi4py's Gatherv into preallocated memory, counts known."""
    case.comm.Gatherv(case.send, case.recv, ROOT)
    return case.out


def gather_mpi4py_new(case: Case) -> Tensor | None:
    """mpi4py, into a new tensor each time; the counts are gathered first, with the lower-case call."""
    counts = case.comm.gather(len(case.shard), ROOT)
    out = None if counts is None else torch.empty(sum(counts), dtype=case.shard.dtype)
    recv = None if out is None else [out.numpy(), counts, MPI.INT64_T]
    case.comm.Gatherv([case.shard.numpy(), MPI.INT64_T], recv, ROOT)
    return out


def gather_mpi4py_pickle(case: Case) -> Tensor | None:
    """mpi4py's lower-case call, which pickles the tensors."""
    parts = case.comm.gather(case.shard, ROOT)
    return None if parts is None else torch.cat(parts)


def gather_gloo_padded(case: Case) -> Tensor | None:
    """Exchange sizes, pad to the largest, gather into a list on the root, trim, cat."""
    sizes = _sizes_of_all(case.shard)
    padded = _pad(case.shard, max(sizes))
    if case.rank != ROOT:
        dist.gather(padded, None, ROOT)
        return None
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, parts, ROOT)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_gloo_into_tensor(case: Case) -> Tensor | None:
    """The same as for concat, since there is no ragged gather; all ranks but the root drop the result."""
    whole = concat_gloo_into_tensor(case)
    return whole if case.rank == ROOT else None


def gather_gloo_sends(case: Case) -> Tensor | None:
    """Exchange sizes, then send to the root, which receives directly into place."""
    sizes = _sizes_of_all(case.shard)
    whole = case.shard.new_empty(sum(sizes)) if case.rank == ROOT else None
    _send_to_root(case.shard, () if whole is None else torch.split(whole, sizes))
    return whole


def gather_gloo_object(case: Case) -> Tensor | None:
    """gather_object: torch pickles, pads and unpickles."""
    parts = [case.shard] * dist.get_world_size() if case.rank == ROOT else None
    dist.gather_object(case.shard, parts, ROOT)
    return None if parts is None else torch.cat(parts)


# split


def split_mpi4py(case: Case) -> Tensor | None:
    """The baseline: mpi4py's Scatterv into preallocated memory, counts known."""
    case.comm.Scatterv(case.send, case.recv, ROOT)
    return case.out


def split_mpi4py_new(case: Case) -> Tensor:
    """mpi4py, into a new tensor each time; the counts are scattered first, with the lower-case call."""
    rows = case.comm.scatter(case.counts if case.rank == ROOT else None, ROOT)
    out = torch.empty(rows, dtype=torch.int64)
    send = None if case.whole is None else [case.whole.numpy(), case.counts, MPI.INT64_T]
    case.comm.Scatterv(send, [out.numpy(), MPI.INT64_T], ROOT)
    return out


def split_mpi4py_pickle(case: Case) -> Tensor:
    """mpi4py's lower-case call, which pickles the parts (cloned: torch would pickle the whole with each)."""
    parts = None if case.whole is None else [part.clone() for part in torch.split(case.whole, case.counts)]
    part: Tensor = case.comm.scatter(parts, ROOT)
    return part


def split_gloo_padded(case: Case) -> Tensor:
    """Broadcast the sizes, pad every part to the largest, scatter, trim: gloo's scatter refuses unequal parts
    (pytorch#84566), and DTensor pads its shards for the same reason (pytorch#102661)."""
    sizes = _sizes_from_root(case.counts)
    mine = torch.empty(max(sizes), dtype=torch.int64)
    parts = None if case.whole is None else [_pad(part, max(sizes)) for part in torch.split(case.whole, sizes)]
    dist.scatter(mine, parts, ROOT)
    return mine[: sizes[case.rank]]


def split_gloo_broadcast(case: Case) -> Tensor:
    """Broadcast the whole, then copy this rank's part."""
    sizes = _sizes_from_root(case.counts)
    whole = torch.empty(sum(sizes), dtype=torch.int64) if case.whole is None else case.whole
    dist.broadcast(whole, ROOT)
    return torch.split(whole, sizes)[case.rank].clone()


def split_gloo_sends(case: Case) -> Tensor:
    """Broadcast the sizes, then the root sends each part directly from its place."""
    sizes = _sizes_from_root(case.counts)
    mine = torch.empty(sizes[case.rank], dtype=torch.int64)
    if case.whole is None:
        dist.recv(mine, ROOT)
        return mine
    parts = torch.split(case.whole, sizes)
    works = [dist.isend(part, rank) for rank, part in enumerate(parts) if rank != ROOT]
    mine.copy_(parts[ROOT])
    _wait(works)
    return mine


def split_gloo_object(case: Case) -> Tensor:
    """scatter_object_list: torch pickles the parts (cloned: it would pickle the whole with each), pads, unpickles."""
    parts = None if case.whole is None else [part.clone() for part in torch.split(case.whole, case.counts)]
    mine: list[Tensor] = [torch.empty(0)]
    dist.scatter_object_list(mine, parts, ROOT)
    return mine[0]
