"""Verdicts that all ranks of a test share: it fails on all of them, and no rank waits for one that has failed."""

import os
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import copy_of, part, same_bits

import hpcdist as hd
from hpcdist.runtime.world import context, team_of
from hpcdist.validation import collective
from hpcdist.validation.collective import Call

# torch 2.13 gave two functions a new name and deprecates the old one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
several_ranks = pytest.mark.mpi(min_size=2)
_SHOWN = 6  # a loop with one mistake finds it in every turn


def change_settings(patch, world, **changes):
    """Let the world have other settings until `patch` is undone."""
    changed = replace(world.settings, **changes)
    teams = list(context().teams.values())
    for holder in (world, context(), *teams, *(team.background for team in teams)):
        patch.setattr(holder, "settings", changed)


def windows_of(group=None):
    """The bytes that each window of a team takes."""
    return [os.fstat(slot.block.fd).st_blocks * 512 for slot in list(team_of(group).windows.slots.values())]


def assert_on_all_ranks(condition, message="", comm=None):
    """Fail on every rank, of the world or of `comm`, naming the ranks on which `condition` is false and what they have
    to say."""
    comm = comm or hd.current().comm
    _meet(comm)
    verdicts = comm.allgather(None if condition else str(message) or "condition is false")
    failed = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}
    if failed:
        lines = [f"  rank {rank}: {verdict}" for rank, verdict in failed.items()]
        raise AssertionError("\n".join([f"failed on ranks {sorted(failed)} of {comm.size}", *lines]))


def raises_on_all_ranks(kind, step, same_text=True):
    """Run `step`, which must raise `kind`, with the same text, on every rank of `comm`; returns the error."""
    error = None
    try:
        step()
    except Exception as caught:
        error = caught
    expected = f"expected {kind.__name__}, got {error!r}"
    assert_on_all_ranks(isinstance(error, kind), expected)
    texts = hd.current().comm.allgather(str(error))
    assert_on_all_ranks(len(set(texts)) == 1, f"the error's text differs between ranks, here: {error}")
    return error


def refused(text, call, *args, ranks=None, what="", **options):
    """The error of a call, the same on every rank, with this text in it, and from these ranks."""
    error = raises_on_all_ranks(hd.RankError, lambda: call(*args, **options))
    right = text in str(error) and (ranks is None or [*error.problems] == [*ranks])
    assert_on_all_ranks(right, f"{what}: {error}")
    return error


def goes_on():
    """The call after a refused one is right."""
    world = hd.current()
    expected = torch.arange(world.world_size)
    assert_on_all_ranks(torch.equal(hd.concat(expected[world.rank]), expected), "the next call")


class Findings:
    """What a loop of collectives finds wrong: told at its end, so that no rank leaves the loop before the others."""

    def __init__(self, comm):
        self.comm = comm
        self.found = []
        self.checked = 0

    def check(self, condition, message):
        self.checked += 1
        if not condition:
            self.found.append(str(message))

    def same(self, got, expected, message):
        """`got` is a tensor with the dtype, shape and bits of `expected`."""
        if not isinstance(got, torch.Tensor):
            self.check(False, f"{message}: expected a tensor, got {got!r}")
        else:
            shown = f"{message}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
            self.check(same_bits(got, expected), f"{shown}, of the values given by the oracle")

    def settle(self):
        """The verdict, on all ranks; a loop that checked nothing has proven nothing."""
        more = f" (and {len(self.found) - _SHOWN} more)" if len(self.found) > _SHOWN else ""
        assert_on_all_ranks(not self.found, "\n    ".join(self.found[:_SHOWN]) + more, self.comm)
        assert_on_all_ranks(self.checked, "nothing was checked", self.comm)


class Battery:
    """The verbs on one whole tensor, and what each rank must hold afterwards."""

    def __init__(self, world, rank=-1, **options):
        self.findings, self.options = Findings(world.comm), options
        self.rank = world.rank if rank < 0 else rank  # in the group

    def run(self, whole, dim, extents, root):
        """`whole` may have any strides: the shards are views of it."""
        context = f"{whole.dtype} {tuple(whole.shape)} dim {dim} extents {extents} root {root} {self.options}"
        before, shard, rank, options = copy_of(whole), part(whole, dim, extents, self.rank), self.rank, self.options
        mine, counts = part(before, dim, extents, rank), list(extents) if rank in (root, 0) else None
        for verb, result, expected in (
            ("gather", hd.gather(shard, dim, root, **options), before if rank == root else None),
            ("concat", hd.concat(shard, dim, **options), before),
            ("split", hd.split(whole if rank == root else None, dim, root, counts, **options), mine),
            ("redistribute", hd.redistribute(shard, hd.Split(dim, extents), hd.Replicate(), **options), before),
        ):
            if expected is None:
                self.findings.check(result is None, f"{verb} {context}: got a result, expected None")
                continue
            self.findings.same(result, expected, f"{verb} {context}")
            own = result.is_contiguous() and result.untyped_storage().nbytes() == result.nbytes
            own = own and not result.requires_grad
            self.findings.check(own, f"{verb} {context}: the result is not memory of its own, or has a gradient")
        self.findings.same(whole, before, f"input changed: {context}")


def _meet(comm):
    """Fail, rather than wait, if a rank of the world has already left the test: see :func:`failures_elsewhere`."""
    if (team := _team_of_all(comm)) is not None:
        collective.exchange(team, Call("assert_on_all_ranks"))


def _team_of_all(comm):
    """The team of the world, if there is one, and `comm` has all its ranks."""
    with suppress(hd.HpcdistError):
        return team_of() if comm.size == hd.current().world_size else None


def failures_elsewhere(comm, error):
    """Wait for all ranks at the end of a phase of a test, in which `error` came out of it here.

    A rank that failed early answers the verbs and verdicts of the others meanwhile, so that they fail and come too.

    Returns:
        What went wrong on the other ranks.
    """
    if (team := _team_of_all(comm)) is not None:
        collective.leave(team)
    errors = comm.allgather(None if error is None else f"{type(error).__name__}: {error}")
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None and rank != comm.rank]
    return "\n".join(lines) or None
