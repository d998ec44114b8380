"""More hand-written implementations of gather, concat and split, beside those of hpcdist.compare.byhand.

Each takes a shards.Case and returns the result on this rank, or None. All shards are 1-d and of one dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from shards import ROOT, Case
from torch import Tensor

from hpcdist.compare.byhand import padded_to, sizes_of_all

# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)


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


def concat_into_tensor(case: Case) -> Tensor:
    """all_reduce of the sizes, pad to the largest, all_gather_into_tensor, trim if ragged: as accelerate's
    pad_across_processes and gather, whose users trim themselves."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(case.x)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    whole = case.x.new_empty(len(sizes) * longest)
    dist.all_gather_into_tensor(whole, padded_to(case.x, longest))
    if int(sizes.min()) == longest:
        return whole
    rows = whole.view(-1, longest)
    return torch.cat([row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)])


def concat_by_root(case: Case) -> Tensor:
    """Send unpadded shards to the root, and broadcast the whole from there."""
    sizes = sizes_of_all(case)
    whole = case.x.new_empty(sum(sizes))
    _send_to_root(case.x, torch.split(whole, sizes))
    dist.broadcast(whole, ROOT)
    return whole


def gather_into_tensor(case: Case) -> Tensor | None:
    """The same as for concat, since there is no ragged gather; all ranks but the root drop the result."""
    whole = concat_into_tensor(case)
    return whole if case.rank == ROOT else None


def gather_sends(case: Case) -> Tensor | None:
    """Exchange sizes, then send to the root, which receives directly into place."""
    sizes = sizes_of_all(case)
    whole = case.x.new_empty(sum(sizes)) if case.rank == ROOT else None
    _send_to_root(case.x, () if whole is None else torch.split(whole, sizes))
    return whole


def split_broadcast(case: Case) -> Tensor:
    """Broadcast the whole, then copy this rank's part."""
    sizes = sizes_of_all(case)
    whole = torch.empty(sum(sizes), dtype=case.dtype) if case.x is None else case.x
    dist.broadcast(whole, ROOT)
    return torch.split(whole, sizes)[case.rank].clone()


def split_sends(case: Case) -> Tensor:
    """Broadcast the sizes, then the root sends each part directly from its place."""
    sizes = sizes_of_all(case)
    mine = torch.empty(sizes[case.rank], dtype=case.dtype)
    if case.x is None:
        dist.recv(mine, ROOT)
        return mine
    parts = torch.split(case.x, sizes)
    works = [dist.isend(part, rank) for rank, part in enumerate(parts) if rank != ROOT]
    mine.copy_(parts[ROOT])
    _wait(works)
    return mine
