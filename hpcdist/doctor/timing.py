"""Time each route briefly, to find routes that fail and routes that are far too slow."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from hpcdist.collectives.concat import concat
from hpcdist.control import objects
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.network import gloo_problem
from hpcdist.doctor.supervisor import Line
from hpcdist.doctor.topics import Ranks, Section, Topic, Verdict
from hpcdist.errors import HpcdistError
from hpcdist.routes import select
from hpcdist.runtime.cli import placed, timed
from hpcdist.runtime.world import World

__all__ = ["gather", "judge"]

_NBYTES = 2**20  # a rank
_ROUNDS = 3  # after a warm-up that is not counted

_FIXES = {
    "nccl": "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1; /dev/shm",
    "gloo": "unset GLOO_SOCKET_IFNAME; look at the findings about the network",
    "mpi": "look at the findings about MPI and /dev/shm",
    "hdf5": "look at the finding about the staging folder",
}


def gather(line: Line, world: World, ranks: Ranks, facts: Facts) -> None:
    """Time a concat of 1 MiB a rank over each route; add "routes" to the facts of this rank. Collective.

    Args:
        ranks: facts of all ranks.
    """
    facts["routes"] = {}
    for name in select.ROUTES:
        line.stage(f"route {name}", _FIXES[name], together=True)
        absent = select.load(name).missing(world.team)
        if name == "gloo" and (problem := gloo_problem(ranks)):  # else gloo fails or hangs in its first call
            absent = f"GLOO_SOCKET_IFNAME: {problem}"
        facts["routes"][name] = {"absent": absent} if absent else _time(world, name)
        line.facts([facts])


def _time(world: World, name: str) -> dict[str, Any]:
    x = placed(world, torch.full((_NBYTES,), world.rank % 128, dtype=torch.uint8, device="cpu"), name)
    expected = torch.arange(world.world_size, device="cpu").remainder(128).repeat_interleave(_NBYTES)
    try:
        whole = concat(x, route=name)
        seconds = [timed(world, lambda: concat(x, route=name, out=whole))[0] for _ in range(_ROUNDS)]
    except HpcdistError as error:  # the same on all ranks
        return {"error": str(error)}
    right = all(objects.all_gather_object(world.team.comm, bool(torch.equal(whole.cpu(), expected.to(torch.uint8)))))
    return {"seconds": median(seconds), "bytes": _NBYTES * world.world_size, "right": right}


def _judge(name: str, ranks: Ranks) -> Verdict:
    row, fix = ranks[0]["routes"][name], _FIXES[name]
    if "absent" in row:
        return "ok", f"not here: {row['absent']}"
    if "error" in row:
        return "broken", " ".join(row["error"].split()), fix
    if not row["right"]:
        return "broken", "the data received differ from those sent", fix
    rate = row["bytes"] / max(row["seconds"], 1e-9) / 1e6
    return "ok", f"concat of 1 MiB a rank: {row['seconds'] * 1e3:7.2f} ms, {rate:6.0f} MB/s"


judge = Section(
    "routes", *(Topic(f"route {name}", [f"routes.{name}"], partial(_judge, name)) for name in select.ROUTES)
)
