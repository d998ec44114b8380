"""The command ``python -m hpcdist.run``: make a world, set torchrun's variables, and become the program."""

from __future__ import annotations

import argparse
import atexit
import io
import os
import re
import runpy
import signal
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn, TextIO

import mpi4py

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, reason, refusal
from hpcdist.process import abort
from hpcdist.process.replaced import Replaced
from hpcdist.process.streams import INTERRUPTED
from hpcdist.runtime import world
from hpcdist.runtime.cli import refuse
from hpcdist.runtime.commandline import BAD_INPUT, Parser, is_rank_0, line, path
from hpcdist.runtime.registration import host

_LAUNCHERS = re.compile(
    r"torchrun|accelerate(-launch)?|deepspeed|ds|horovodrun|mpirun|mpiexec|srun|python[\d.]*"
    r"|torch\.distributed\.(run|launch)|accelerate\.commands\..*|deepspeed\.launcher\..*"
)
_FIRST = 2.0  # seconds in which rank 0 ends the job, if it does the same
_before = sys.excepthook


def _parser() -> Parser:
    parser = Parser(
        prog="hpcdist run",
        description="Run a program that is written for torchrun, unchanged, on the ranks of an MPI job. It finds the "
        "variables that torchrun sets. If one rank fails, the job ends.",
        epilog="example: srun python -m hpcdist.run train.py --epochs 3",
        prints=world.is_first,
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--mpi", action="store_true", help="use backend mpi where the program asks for gloo")
    parser.add_argument("--bind", choices=["numa"], help="bind each rank to the cores of one NUMA domain, near its GPU")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--tag-output", action="store_true", help="begin each line of Python's output with [RANK]")
    output.add_argument(
        "--rank-output", type=path, metavar="DIR", help="append the output of each rank to DIR/rank-N.txt"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the program, a file of Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments").required = False
    return parser


class _Tagged(io.RawIOBase):
    """A standard stream whose lines begin with a tag. A line is written when it is whole, so that no other rank's line
    cuts it; its end may be a carriage return, as in a progress bar."""

    def __init__(self, stream: TextIO, tag: bytes) -> None:
        self._stream, self._tag, self._rest = stream.buffer, tag, b""
        self.fileno = stream.fileno  # type: ignore[method-assign]
        atexit.register(self._end)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        *lines, self._rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self._rest + bytes(data))
        self._write_lines(lines)
        return len(data)

    def _end(self) -> None:
        self._write_lines([self._rest] if self._rest else [])

    def _write_lines(self, lines: list[bytes]) -> None:
        self._stream.write(b"".join(self._tag + line for line in lines))
        self._stream.flush()


def _opened(rank: int, folder: str) -> int:
    """Open the file of this rank's output."""
    try:
        os.makedirs(folder, exist_ok=True)
        return os.open(Path(folder, f"rank-{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise refusal(ValueError, "HD410", f"--rank-output {folder}: {reason(error)}") from error


def _direct_output(rank: int, tag: bool, files: list[int]) -> None:
    """Direct this rank's output as the command line asks; print each line at once, as under torchrun."""
    for file in files:
        for fd in (1, 2):
            os.dup2(file, fd)
        os.close(file)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(line_buffering=True)
            if tag:
                raw = _Tagged(stream, b"[%d] " % rank)
                setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def _compiled(script: str, module: bool) -> CodeType | None:
    """Return the code of a script; None for a module. An error names the program's problem before it runs."""
    name = script if module else Path(script).name
    if _LAUNCHERS.fullmatch(name):
        text = f"{name} would start processes that are not ranks of this job: omit it, and name the program"
        raise refusal(ValueError, "HD106", text)
    if module:
        try:
            spec: Any = find_spec(script)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = find_spec(f"{script}.__main__")
            code = spec and spec.loader and spec.loader.get_code(spec.name)
        except ModuleNotFoundError as error:
            raise refusal(ValueError, "HD401", f"module {script} cannot be found: {reason(error)}") from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {reason(error)}, at {frame.filename}:{frame.lineno}"
            raise refusal(ValueError, "HD402", f"module {script} cannot be imported: {text}") from error
        if code is None:
            raise refusal(
                ValueError, "HD401", f"there is no module {script} that can run, in {sys.path[0]} or installed"
            )
        return None
    if not Path(script).is_file():
        raise refusal(ValueError, "HD401", f"there is no file {script!r}, from {os.getcwd()}")
    try:
        return compile(Path(script).read_bytes(), os.path.abspath(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: null bytes
        raise refusal(ValueError, "HD402", f"{script} is not a program in Python: {reason(error)}") from error


def _refuse_init(*_: object) -> NoReturn:
    """End the job in place of MPI.Init(): a second one is an error of MPI, which some libraries do not survive."""
    caller = sys._getframe(1)
    where = f"MPI.Init() at {caller.f_code.co_filename}:{caller.f_lineno}"
    text = f"{where}: MPI runs already; leave this call out, or make it only if not MPI.Is_initialized()"
    if not is_rank_0():
        time.sleep(_FIRST)
    abort.print_error(f"hpcdist run: error: {line(HpcdistError('HD112', text))}")
    abort.job(BAD_INPUT)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does, with the program's own part of the traceback."""
    own, entry = trace, trace
    while entry is not None:
        name, entry = entry.tb_frame.f_code.co_filename, entry.tb_next
        if name == __file__ or (name == "<frozen runpy>" and entry is not None and own is not trace):
            own = entry
    _before(kind, error.with_traceback(own), own)


def main() -> None:
    """Make the world, and run the program in this process, as ``__main__``."""
    sys.excepthook = _excepthook
    parser = _parser()
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}: omit torchrun's options: the MPI launcher has its own"
        )
    code: list[CodeType | None] = []
    files: list[int] = []
    mpi4py.rc.initialize = False  # launcher.job() starts MPI, and does not end it in children that the program forks
    try:
        here = world.prepare(args.bind)
        sys.argv = [args.script, *args.arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd() if args.module else os.path.dirname(os.path.realpath(args.script))

        def check() -> None:
            code.append(_compiled(args.script, args.module))
            if args.rank_output is not None:
                files.append(_opened(here.rank, args.rank_output))

        objects.run_on_all(world.team_of().comm, "run", check)
    except HpcdistError as error:
        refuse(parser.prog, error)
    _direct_output(here.rank, args.tag_output, files)
    from mpi4py import MPI

    replaced = Replaced()
    for name in ("Init", "Init_thread"):
        replaced.set(MPI, name, _refuse_init)
    host.by_mpi = args.mpi
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by the package, for the time of the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if code[0] is None:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            program = sys.modules["__main__"] = ModuleType("__main__")
            program.__file__ = code[0].co_filename
            exec(code[0], vars(program))
    except SystemExit as error:
        abort.replace(error)
        raise
    except KeyboardInterrupt as error:
        if here.world_size > 1:
            raise
        sys.excepthook(type(error), error, error.__traceback__)  # Python would exit with 1, in a module
        sys.exit(INTERRUPTED)
    finally:
        replaced.put_back()


if __name__ == "__main__":
    main()
