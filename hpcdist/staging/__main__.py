"""The command ``python -m hpcdist.staging``: list a file, and compare it with its checksums."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError
from hpcdist.files.regular import open_regular, shown
from hpcdist.runtime.cli import Parser, meter, ranks_text, run, show_bytes, table
from hpcdist.runtime.world import World
from hpcdist.staging.catalog import Catalog, Stored, describe
from hpcdist.staging.reader import DatasetReader
from hpcdist.staging.target import WINDOW

_DAMAGED = 1  # exit status if a piece differs from its checksum
_MAX_SHOWN = 20  # damaged pieces


def main(world: World, args: argparse.Namespace) -> int:
    """Run the subcommand on the ranks of the world; return the exit status. Collective."""
    catalog = objects.broadcast(world.team.comm, args.what, lambda: describe(args.file, incomplete=args.what == "ls"))
    if args.what == "verify":
        return _verify(world, catalog, args)
    if world.rank == 0:
        print(json.dumps(_as_json(catalog)) if args.json else _listing(catalog), flush=True)
    return 0


def _listing(catalog: Catalog) -> str:
    rows = [
        [
            shown(stored.name),
            str(stored.shape),
            str(stored.dtype).removeprefix("torch."),
            show_bytes(stored.nbytes()),
            "-" if stored.pieces is None else f"{_written(stored)}/{len(stored.pieces)}",
            _writers(stored),
            stored.filters or "contiguous",
        ]
        for stored in catalog.datasets.values()
    ]
    rows += [[shown(name), "-", "-", "-", "-", "-", why] for name, why in catalog.external.items()]
    head = ["name", "shape", "dtype", "size", "pieces", "writers", "storage"]
    return "\n".join([table(head, rows), "", f"state: {_state(catalog)}"])


def _state(catalog: Catalog) -> str:
    if catalog.plan is None:
        return "not written by hpcdist: no checksums"
    return "complete" if catalog.complete else "INCOMPLETE: the job that wrote it ended before it was done"


def _written(stored: Stored) -> int:
    return 0 if stored.pieces is None else int(stored.pieces["written"].sum())


def _writers(stored: Stored) -> str:
    """Return the ranks that wrote the pieces, as text."""
    if stored.pieces is None or not _written(stored):
        return "-"
    return ranks_text(stored.pieces["rank"][stored.pieces["written"] == 1].tolist())


def _as_json(catalog: Catalog) -> dict[str, Any]:
    return {
        "path": catalog.path,
        "state": "foreign" if catalog.plan is None else "complete" if catalog.complete else "incomplete",
        "tensors": [
            {
                "name": stored.name,
                "shape": list(stored.shape),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "bytes": stored.nbytes(),
                "pieces": None if stored.pieces is None else len(stored.pieces),
                "written": None if stored.pieces is None else _written(stored),
                "filters": stored.filters,
            }
            for stored in catalog.datasets.values()
        ],
        "elsewhere": catalog.external,
    }


def _verify(world: World, catalog: Catalog, args: argparse.Namespace) -> int:
    """Read every piece once; each rank reads its share. Collective."""
    pieces = [(stored, row) for stored in catalog.datasets.values() for row in range(len(stored.boxes))]
    if catalog.plan is None:
        raise InputError("HD403", f"{args.file}: not written by hpcdist: it holds no checksums")
    mine = [pieces[i] for i in layout.block_range(len(pieces), world.world_size, world.rank)]
    damaged: list[str] = []

    def check() -> None:
        total = sum(stored.boxes[row].size() * stored.dtype.itemsize for stored, row in mine)
        with open_regular(args.file) as fd, meter(world, "verify", total) as bar:
            for stored, row in mine:
                try:
                    DatasetReader(args.file, fd, stored).check(row, WINDOW)
                except FileError as error:
                    damaged.append(str(error))
                bar.update(stored.boxes[row].size() * stored.dtype.itemsize)

    objects.all_gather(world.team.comm, "verify", check)
    found = [text for texts in objects.all_gather_object(world.team.comm, damaged) for text in texts]
    if world.rank == 0:
        nbytes = sum(stored.nbytes() for stored in catalog.datasets.values())
        report = {"path": args.file, "pieces": len(pieces), "bytes": nbytes, "damaged": found}
        print(json.dumps(report) if args.json else _verdict(args.file, len(pieces), nbytes, found), flush=True)
    return _DAMAGED if found else 0


def _verdict(path: str, pieces: int, nbytes: int, damaged: list[str]) -> str:
    path, damaged = shown(path), [shown(text) for text in damaged]
    if not damaged:
        return f"{path}: {pieces} pieces, {show_bytes(nbytes)}: all as they were written"
    more = [f"and {len(damaged) - _MAX_SHOWN} more"] if len(damaged) > _MAX_SHOWN else []
    return "\n".join([*damaged[:_MAX_SHOWN], *more, f"{path}: {len(damaged)} of {pieces} pieces are DAMAGED"])


def parser() -> Parser:
    """Return the parser of python -m hpcdist.staging."""
    p = Parser(
        prog="hpcdist.staging",
        description="List or verify an HDF5 file that hpcdist.staging has written.",
        epilog="example: mpirun -n 4 python -m hpcdist.staging verify whole.h5",
    )
    what = p.add_subparsers(dest="what", required=True, metavar="ls|verify")
    ls = what.add_parser("ls", help="list the tensors: shape, dtype, pieces, their writers, and the state of the file")
    verify = what.add_parser("verify", help="compare every piece with its checksum; exit status 1 if one is damaged")
    for sub in (ls, verify):
        sub.add_argument("file", metavar="FILE")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p


if __name__ == "__main__":
    run(parser(), main)
