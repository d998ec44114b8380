"""Time each route briefly, to find routes that fail and routes that are far too slow."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from hpcdist.collectives.concat import concat
from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.doctor.findings import Finding
from hpcdist.doctor.supervisor import Line
from hpcdist.errors import HpcdistError
from hpcdist.routes import select
from hpcdist.runtime.cli import placed, timed
from hpcdist.runtime.world import World, environ

__all__ = ["gather", "judge"]

_NBYTES = 2**20  # a rank
_ROUNDS = 3  # after a warm-up that is not counted

_FIXES = {
    "nccl": "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1; /dev/shm",
    "gloo": "unset GLOO_SOCKET_IFNAME; look at the findings about the network",
    "mpi": "look at the findings about MPI and /dev/shm",
    "hdf5": "look at the finding about the staging folder",
}


def gather(line: Line, world: World) -> list[dict[str, Any]]:
    """Time a concat of 1 MiB a rank over each route. Collective."""
    rows = []
    for name in select.ROUTES:
        line.stage(f"route {name}", _FIXES[name], together=True)
        rows.append({"route": name, **_time(world, name)})
    return rows


def _time(world: World, name: str) -> dict[str, Any]:
    absent = select.load(name).missing(world.team)
    if name == "gloo" and any(objects.all_gather_object(world.team.comm, _names_no_interface())):
        absent = "GLOO_SOCKET_IFNAME names an interface that is not there"
    if absent:
        return {"absent": absent}
    x = placed(world, torch.full((_NBYTES,), world.rank % 128, dtype=torch.uint8, device="cpu"), name)
    expected = torch.arange(world.world_size, device="cpu").remainder(128).repeat_interleave(_NBYTES)
    try:
        whole = concat(x, route=name)
        seconds = [timed(world, lambda: concat(x, route=name, out=whole))[0] for _ in range(_ROUNDS)]
    except HpcdistError as error:  # the same on all ranks
        return {"error": str(error)}
    right = all(objects.all_gather_object(world.team.comm, bool(torch.equal(whole.cpu(), expected.to(torch.uint8)))))
    return {"seconds": median(seconds), "bytes": _NBYTES * world.world_size, "right": right}


def _names_no_interface() -> bool:
    """Whether gloo would fail on this node, in the middle of its first call."""
    named = environ().get("GLOO_SOCKET_IFNAME", "")
    return any(name not in rendezvous.interfaces() for name in named.split(",") if name)


def judge(rows: list[dict[str, Any]]) -> list[Finding]:
    """Return a finding for each route."""
    return [_judge(row) for row in rows]


def _judge(row: dict[str, Any]) -> Finding:
    name = f"route {row['route']}"
    if "absent" in row:
        return Finding(name, "ok", f"not here: {row['absent']}")
    fix = _FIXES[row["route"]]
    if "error" in row:
        return Finding(name, "broken", " ".join(row["error"].split()), fix)
    if not row["right"]:
        return Finding(name, "broken", "the data received differ from those sent", fix)
    rate = row["bytes"] / max(row["seconds"], 1e-9) / 1e6
    return Finding(name, "ok", f"concat of 1 MiB a rank: {row['seconds'] * 1e3:7.2f} ms, {rate:6.0f} MB/s")
