"""The commands ``hpcdist ls`` and ``hpcdist verify``: list the tensors of a file, and compare them with their
checksums."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.errors import FileError
from hpcdist.formats.contents import Contents, Stored
from hpcdist.formats.known import describe
from hpcdist.formats.paths import shown
from hpcdist.layout import Box
from hpcdist.runtime.cli import meter, ranks_text, run, table
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.staging.writer import WINDOW
from hpcdist.tensors import pool

_DAMAGED = 1  # exit status if a piece differs from its checksum
_MAX_SHOWN = 20  # damaged pieces


def main(world: World, args: argparse.Namespace) -> int:
    """Run the command on the ranks of the world; return the exit status. Collective."""
    contents = objects.run_on_root(team_of().comm, args.what, lambda: describe(args.file).with_tables())
    if args.what == "verify":
        return _verify(world, contents, args.json)
    if world.rank == 0:
        report = _report(contents)
        print(json.dumps(report) if args.json else _listing(report), flush=True)
    return 0


def _report(contents: Contents) -> dict[str, Any]:
    """Return the JSON output of ls."""
    tensors = []
    for stored in contents.tensors.values():
        how = "read by its library" if stored.raw is None else "contiguous"
        if stored.parts is not None:
            how = plural(len(stored.parts.places), "part")
        tensors.append({
            "name": stored.name, "shape": list(stored.shape), "dtype": str(stored.dtype).removeprefix("torch."),
            "bytes": stored.nbytes(), "pieces": None if stored.pieces is None else len(stored.table),
            "writers": ranks_text(stored.table["rank"].tolist()) if len(stored.table) else None,
            "storage": how,
        })  # fmt: skip
    return {
        "path": contents.path, "kind": contents.kind, "checksums": contents.checked, "tensors": tensors,
        "elsewhere": contents.external, "left_out": contents.left_out,
    }  # fmt: skip


def _listing(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ["name", "shape", "dtype", "size", "pieces", "writers", "storage"]
    rows = []
    for of in report["tensors"]:
        of |= {"name": shown(of["name"]), "shape": tuple(of["shape"]), "size": show_bytes(of["bytes"])}
        rows.append(["-" if of[column] in (None, "") else of[column] for column in head])
    others = report["elsewhere"] | report["left_out"]
    rows += [[shown(name), *["-"] * 5, why] for name, why in others.items()]
    state = "complete, with checksums" if report["checksums"] else "no checksums of hpcdist's"
    return "\n".join([table(head, rows), "", f"{report['kind']}: {state}"])


def _verify(world: World, contents: Contents, as_json: bool) -> int:
    """Read everything once; each rank reads its share. Collective."""
    pieces: list[tuple[Stored, int | None, Box]] = []
    for stored in contents.tensors.values():
        if stored.pieces is None:  # no checksums: only that it can be read
            whole = layout.whole(stored.shape)
            pieces += [(stored, None, box) for box in layout.boxes(whole, max(1, PIECE // stored.dtype.itemsize))]
        else:
            pieces += [(stored, row, box) for row, box in enumerate(stored.boxes)]
    mine = [pieces[i] for i in layout.block_range(len(pieces), world.world_size, world.rank)]
    damaged: list[str] = []

    def check() -> None:
        total = sum(box.size() * stored.dtype.itemsize for stored, _, box in mine)
        with OpenFiles(contents) as files, meter(world, "verify", total) as bar:
            for stored, row, box in mine:
                reader = TensorReader(files, stored, WINDOW)
                try:
                    if row is None:
                        reader.read(box, pool.empty(box.shape, stored.dtype, "cpu", fixed=True))
                    else:
                        reader.check(row)
                except FileError as error:
                    damaged.append(str(error))
                bar.update(box.size() * stored.dtype.itemsize)

    objects.run_on_all(team_of().comm, "verify", check)
    found = [text for texts in objects.all_gather_object(team_of().comm, damaged) for text in texts]
    found += contents.damaged
    if world.rank == 0:
        report = {
            "path": contents.path, "checksums": contents.checked, "pieces": len(pieces), "bytes": contents.nbytes(),
            "damaged": found, "left_out": contents.left_out,
        }  # fmt: skip
        print(json.dumps(report) if as_json else _verdict(contents, len(pieces), found), flush=True)
    return _DAMAGED if found else 0


def _verdict(contents: Contents, pieces: int, damaged: list[str]) -> str:
    name, damaged = shown(contents.path), [shown(text) for text in damaged]
    if not damaged:
        checked = "all match their checksums" if contents.checked else "all can be read; there are no checksums"
        lines = [f"LEFT OUT: {contents.others()}"] if contents.left_out else []
        return "\n".join([*lines, f"{name}: {plural(pieces, 'piece')}, {show_bytes(contents.nbytes())}: {checked}"])
    more = [f"and {len(damaged) - _MAX_SHOWN} more"] if len(damaged) > _MAX_SHOWN else []
    return "\n".join([*damaged[:_MAX_SHOWN], *more, f"{name}: DAMAGED: {len(damaged)} of {plural(pieces, 'piece')}"])


_ABOUT = {
    "ls": "List the tensors of a file or folder, in any format that staging.load reads: shape, dtype, pieces, their "
    "writers, and how they are stored.",
    "verify": "Compare every piece of a file or folder with its checksum. If a file has no checksums, read all of it. "
    "The exit status is 1 if a piece is damaged.",
}


def parser(what: str) -> Parser:
    """Return the parser of hpcdist ls or hpcdist verify."""
    p = Parser(
        prog=f"hpcdist {what}",
        description=_ABOUT[what],
        epilog=f"example: mpirun -n 4 python -m hpcdist {what} whole.h5",
    )
    p.set_defaults(what=what)
    p.add_argument("file", type=path, metavar="FILE", help="a file or folder of tensors")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p


if __name__ == "__main__":
    run(parser(sys.argv.pop(1)), main)
