"""Checks of a call's arguments on this rank alone, before anything is sent: they raise as torch's own backends do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist.errors import refusal

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = [
    *("SUM", "alike", "exchanged", "gathered", "multiple", "rank", "rooted", "single", "single_list", "splits", "sums"),
    *("tag", "writable"),
]

SUM: Any = ReduceOp.SUM


def single(verb: str, tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the only tensor of a list."""
    if isinstance(tensors, Tensor):
        x = tensors
    elif len(tensors) == 1:
        x = tensors[0]
    else:
        raise refusal(ValueError, "HD701", f"{verb}: expected a single tensor, got {len(tensors)}")
    if x.layout is not torch.strided:
        _refuse_layout(verb, x)
    return x


def _refuse_layout(verb: str, x: Tensor) -> None:
    raise refusal(ValueError, "HD202", f"{verb}: expected a dense tensor, got layout {x.layout}")


def writable(verb: str, outputs: Any) -> None:
    """Check that tensors, in lists of any depth, have a place for each element."""
    for x in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        if isinstance(x, (list, tuple)):
            writable(verb, x)
        elif x.layout is torch.strided and not x.is_contiguous() and torch._debug_has_internal_overlap(x) == 1:
            text = f"elements of the tensor of shape {tuple(x.shape)} lie in one place, as from expand(): clone() it"
            raise refusal(ValueError, "HD202", f"{verb}: {text}")


def sums(verb: str, opts: Any) -> None:
    """Check that the operation is one that sparse tensors have."""
    if opts is not None and opts.reduceOp != SUM:
        raise refusal(ValueError, "HD202", f"{verb}: sparse tensors can be summed only, got {opts.reduceOp}")


def single_list(verb: str, lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the only list of a list."""
    if len(lists) != 1:
        raise refusal(ValueError, "HD701", f"{verb}: expected a single list of tensors, got {len(lists)}")
    return list(lists[0])


def rank(verb: str, number: int, size: int) -> None:
    if not 0 <= number < size:
        raise refusal(ValueError, "HD204", f"{verb}: invalid rank {number} of a group of {size}")


def tag(verb: str, number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise refusal(ValueError, "HD204", f"{verb}: tag {number} is not within 0 to {most}, which this MPI allows")


def alike(verb: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors have one dtype and device."""
    if not tensors:
        raise refusal(ValueError, "HD701", f"{verb}: requires a non-empty list of tensors")
    for x in tensors:
        if x.layout is not torch.strided:
            _refuse_layout(verb, x)
        if x.dtype != tensors[0].dtype or x.device != tensors[0].device:
            raise refusal(
                ValueError,
                "HD701",
                f"{verb}: tensors must have the same dtype and device, got {x.dtype} on {x.device} and "
                f"{tensors[0].dtype} on {tensors[0].device}",
            )


def gathered(verb: str, many: Sequence[Tensor], x: Tensor, team: Communicator) -> None:
    """Check a list with a tensor for each rank, of which that of this rank has the size of `x`."""
    if len(many) != team.size:
        raise refusal(
            ValueError, "HD701", f"{verb}: expected a list of {team.size} tensors, one for each rank, got {len(many)}"
        )
    alike(verb, [x, *many])
    if many[team.rank].numel() != x.numel():
        raise refusal(
            ValueError,
            "HD701",
            f"{verb}: the tensor of this rank has shape {tuple(x.shape)}, the list has {tuple(many[team.rank].shape)} "
            f"at rank {team.rank}",
        )


def rooted(verb: str, lists: Sequence[Sequence[Tensor]], root: int, team: Communicator) -> list[Tensor]:
    """Return the list that the root alone has; an empty one elsewhere."""
    rank(verb, root, team.size)
    if team.rank == root:
        return single_list(verb, lists)
    if lists and any(len(many) for many in lists):
        raise refusal(ValueError, "HD701", f"{verb}: only the root, rank {root}, may pass a list of tensors")
    return []


def multiple(verb: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that a tensor has the size of another on each rank."""
    alike(verb, [whole, part])
    if whole.numel() != part.numel() * size:
        raise refusal(
            ValueError,
            "HD701",
            f"{verb}: {whole.numel()} elements of shape {tuple(whole.shape)} are not {size} times the {part.numel()} "
            f"of shape {tuple(part.shape)}",
        )


def exchanged(verb: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], team: Communicator) -> None:
    """Check the lists of an all_to_all."""
    for many in (outputs, inputs):
        if len(many) != team.size:
            raise refusal(
                ValueError,
                "HD701",
                f"{verb}: expected lists of {team.size} tensors, one for each rank, got {len(many)}",
            )
    gathered(verb, outputs, inputs[team.rank], team)
    alike(verb, [*outputs, *inputs])


class SplitsError(ValueError, RuntimeError):
    """Split sizes that do not fit: a RuntimeError as well, as from torch's own backends."""


def splits(
    verb: str, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], size: int
) -> None:
    """Check the tensors of an all_to_all_single, and how their rows are split."""
    alike(verb, [output, input])
    for name, x, sizes in (("output", output, output_splits), ("input", input, input_splits)):
        if not sizes:
            if x.dim() == 0 or x.shape[0] % size:
                raise refusal(
                    SplitsError,
                    "HD701",
                    f"{verb}: the {name} of shape {tuple(x.shape)} does not divide equally across group size {size}",
                )
        elif len(sizes) != size:
            raise refusal(SplitsError, "HD701", f"{verb}: {len(sizes)} {name}_split_sizes for {size} ranks")
        elif min(sizes) < 0 or sum(sizes) != x.shape[0]:
            raise refusal(
                SplitsError,
                "HD701",
                f"{verb}: {name}_split_sizes {list(sizes)} do not add up to dim 0 of {tuple(x.shape)}",
            )
