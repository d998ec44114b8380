"""The fast network: InfiniBand ports and their state, the speeds of the interfaces, and the network that NCCL uses."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, by_node, each, per_node, some, topic
from hpcdist.errors import reason

__all__ = ["active", "gather", "judge", "log_nccl", "promised", "read_nccl_log"]

_RDMA = Path("/sys/class/infiniband")  # also RoCE, Omni-Path and EFA
_NET = Path("/sys/class/net")
_VERBS = Path("/dev/infiniband")
_SOCKET = "Socket"  # NCCL's name of its network of sockets
_PLUGIN = "export NCCL_NET='AWS Libfabric', which fails without the plugin: module load aws-ofi-nccl"


def gather() -> Facts:
    """Collect the InfiniBand ports of this node, whether this process may use them, and the interfaces' Mbit/s."""
    ports = [found for folder in sorted(_RDMA.glob("*/ports/*")) if (found := _port(folder)) is not None]
    speeds = {}
    for folder in sorted(_NET.glob("*")):
        with suppress(OSError, ValueError):  # unknown, such as that of the loopback interface
            speed = int((folder / "speed").read_text())
            if speed > 0:
                speeds[folder.name] = speed
    return {"rdma": {"ports": ports, "problem": _verbs_problem() if ports else None}, "speeds": speeds}


def _port(folder: Path) -> dict[str, Any] | None:
    """Return device, port, state ("ACTIVE"), Gbit/s and link layer of an InfiniBand port."""
    try:
        state, rate, layer = ((folder / name).read_text().strip() for name in ("state", "rate", "link_layer"))
    except OSError:
        return None
    speed = re.match(r"[\d.]+", rate)  # "200 Gb/sec (4X HDR)"
    return {
        "device": folder.parent.parent.name,
        "port": folder.name,
        "state": state.partition(":")[2].strip() or state,  # "4: ACTIVE"
        "rate": float(speed[0]) if speed else 0.0,
        "layer": layer,
    }


def _verbs_problem() -> str | None:
    """Return why this process cannot use InfiniBand though the node has it; None if it can."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"libibverbs.so.1 cannot be loaded ({reason(error)})"
    files = sorted(_VERBS.glob("uverbs*"))
    if not files:
        return f"there is no {_VERBS}/uverbs*, as in a container that was not given the devices"
    if not any(os.access(path, os.R_OK | os.W_OK) for path in files):
        return f"{files[0]} cannot be opened"
    return None


def active(facts: Facts) -> list[dict[str, Any]]:
    """Return the InfiniBand ports of a rank's node that are up."""
    return [port for port in facts.get("rdma", {}).get("ports", []) if port["state"] == "ACTIVE"]


def promised(facts: Facts, names: Sequence[str]) -> tuple[float, str] | None:
    """Return (bytes/s, name) of the fastest link of a rank's node: InfiniBand, or one of these interfaces."""
    ports = active(facts)
    if ports and not facts["rdma"]["problem"]:
        best = max(ports, key=lambda port: float(port["rate"]))
        return best["rate"] * 1e9 / 8, f"{best['layer']} {best['device']} of {best['rate']:g} Gbit/s"
    speeds = facts.get("speeds", {})
    name = max((name for name in names if name in speeds), key=lambda name: int(speeds[name]), default=None)
    return None if name is None else (speeds[name] * 1e6 / 8, f"{name} of {speeds[name] / 1000:g} Gbit/s")


def log_nccl(environ: MutableMapping[str, str], facts: Facts) -> str | None:
    """Have NCCL write to a file which network it uses, unless the user reads its messages; return the file.

    NCCL says it nowhere else. It reads the environment when it is first used.
    """
    if "NCCL_DEBUG" in environ:
        return None
    path = os.path.join(tempfile.gettempdir(), f"hpcdist-doctor-nccl-{facts['id']}.log")
    environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=path)
    return path


def read_nccl_log(path: str | None) -> str | None:
    """Return the network that NCCL uses ("IB", "Socket", a plugin's name) and remove the file; None if unknown."""
    if path is None:
        return None
    text = ""
    with suppress(OSError):  # NCCL was not used
        text = Path(path).read_text(errors="replace")
        os.unlink(path)
    found = re.search(r"Using network (.+)", text)
    return found[1].strip() if found else None


@topic("InfiniBand", "rdma")
def _ports(ranks: Ranks) -> Verdict:
    nodes = per_node(ranks)
    having = [facts for facts in nodes if facts["rdma"]["ports"]]
    if not having:
        return "ok", "none: no node has a device"
    most = max(nodes, key=lambda facts: len(active(facts)))
    down = [facts for facts in nodes if len(active(facts)) < len(active(most))]
    if down or not active(most):
        texts = [f"{facts['host']}: {_state_text(facts)}" for facts in down or having]
        text = some(texts, 4, "nodes") + (f", where {most['host']} has {len(active(most))} active" if down else "")
        hosts = ",".join(facts["host"] for facts in down or having)
        fix = f"ibstat there; srun --exclude={hosts} and tell the centre; meanwhile export NCCL_IB_DISABLE=1"
        return "broken" if down and active(most) else "warning", text, fix
    rates = {facts["host"]: sum(port["rate"] for port in active(facts)) for facts in nodes}
    slow = [host for host, rate in rates.items() if rate < max(rates.values())]
    if slow:
        text = f"{', '.join(slow)}: {min(rates.values()):g} Gbit/s in all, where others have {max(rates.values()):g}"
        return "warning", text, f"ibstat there, and a new cable; srun --exclude={','.join(slow)}"
    problem = next((facts for facts in ranks if facts["rdma"]["problem"]), None)
    if problem is not None:
        fix = "in a container: apt-get install libibverbs1 ibverbs-providers; docker run --device=/dev/infiniband"
        return "warning", f"rank {problem['rank']} on {problem['host']}: {problem['rdma']['problem']}", fix
    return "ok", each(nodes, _state_text)


def _state_text(facts: Facts) -> str:
    ports = facts["rdma"]["ports"]
    text = ", ".join(f"{p['device']}/{p['port']} {p['state']} ({p['layer']}, {p['rate']:g} Gbit/s)" for p in ports)
    return text or "no device"


@topic("NCCL network", "gpu", "rdma")
def _nccl(ranks: Ranks) -> Verdict:
    """Judge whether NCCL goes between the nodes through sockets though they have something faster."""
    nodes = by_node(ranks)
    users = [facts for facts in ranks if facts["gpu"]["gpus"] and facts["gpu"]["nccl"]]
    if len(nodes) == 1 or not users:
        return "ok", "not needed: one node, or no GPUs"
    used = {facts.get("nccl_network") for facts in users} - {None}
    off = {name: users[0]["environ"][name] for name in ("NCCL_IB_DISABLE", "NCCL_NET") if name in users[0]["environ"]}
    by_hand = off.get("NCCL_IB_DISABLE") == "1" or off.get("NCCL_NET") == _SOCKET
    fast = [port for facts in users for port in active(facts)]
    slingshot = [name for facts in users for name in facts["interfaces"] if name.startswith("hsn")]
    if used == {_SOCKET} or (not used and (by_hand or slingshot)):
        text = "NCCL moves data between the nodes through sockets"
        if by_hand and (fast or slingshot):
            return "warning", f"{text}, because of {', '.join(map('='.join, off.items()))}", f"unset {' '.join(off)}"
        if slingshot:
            sure = text if used else f"{text}, unless it finds the plugin for Slingshot"
            return "warning", f"{sure}: {slingshot[0]} is Slingshot, which needs a plugin", _PLUGIN
        if fast:
            text = f"{text}, though {fast[0]['device']} is active"
            return "warning", text, "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why; see InfiniBand and ulimit -l"
    if len(used) > 1:
        text = each(users, lambda facts: str(facts.get("nccl_network")))
        return "broken", f"not the same on all ranks: {text}", "the same environment and NCCL_ variables on all nodes"
    return "ok", f"NCCL uses {used.pop()}" if used else "not known before NCCL has run"


judge = Section("network", _ports, _nccl)
