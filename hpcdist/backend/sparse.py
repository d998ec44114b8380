"""Sums of sparse tensors, whose elements lie in other places on each rank: DDP has such gradients, of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, split

from hpcdist.backend import collectives

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["all_reduce"]


def all_reduce(team: Communicator, x: Tensor) -> None:
    """Sum the sparse tensors (COO) of all ranks into `x` on every rank, in rank order: the same bits on all of them."""
    mine = x.detach().coalesce()
    counts = torch.empty(team.size, dtype=torch.int64, device="cpu")
    collectives.all_gather_single(team, counts, torch.tensor([mine._nnz()], device="cpu"))
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    whole_indices, whole_values = _gather(team, indices, counts), _gather(team, values, counts)
    total = torch.sparse_coo_tensor(
        whole_indices.t(), whole_values, x.shape, device=x.device, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        x.copy_(total)  # not into x.detach(), which would get a memory of its own


def _gather(team: Communicator, rows: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the rows of all ranks."""
    whole = torch.empty((int(counts.sum()), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    collectives.all_gather(team, list(split(whole, counts.tolist())), rows)
    return whole
