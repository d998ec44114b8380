"""A process that has imported torch and hpcdist, from which the Python processes of jobs are forked: the imports take
seconds of CPU time, and the tests start hundreds of jobs. The end of a process that has loaded torch takes another
quarter of a second, for which it frees what goes with it anyway: a fork ends as Python does, but leaves torch alone.

The launcher starts forked.py, which hands over all that a process gets from its parent (arguments, environment, folder,
descriptors, limits, the namespaces of a host); the fork, which has no MPI yet, goes on as ``python ...`` would.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import types
import weakref
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TextIO

_OWNER = "HPCDIST_TEST_OWNER"  # as forks.OWNER, which is not imported: the forks would have it
_HIGH = 512  # descriptors from here on are ours while those of the caller are put into their places
# How the variables begin that are read when Python begins, or by imports.
_IMPORTED = (
    *("PYTHON", "LD_PRELOAD", "MALLOC_", "GLIBC_", "LC_", "LANG"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS", "TORCH", "PYTORCH_", "NPY_"),
)
# But these are read later, or again.
_LATER = ("PYTHON_EXEC", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_EXTENSIONS_DIR")
_HERE = os.path.dirname(os.path.realpath(__file__))  # an import from here is nothing that has been done already
# Of processes that can be forked for, and the flags of those that a fork can enter.
_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_ENTERED = {"ipc": 0x08000000, "mnt": 0x00020000, "net": 0x40000000, "uts": 0x04000000}
# What takes the time; nothing here may load MPI.
_TORCH = (
    *("torch._dynamo", "torch.distributed._functional_collectives", "torch.distributed.checkpoint"),
    "torch.nn.parallel.distributed",
)
# For the programs of tests/clients, where they are installed. One of DeepSpeed's modules compiles when it is imported.
_CLIENTS = (
    *("accelerate", "datasets", "deepspeed.runtime.zero.muon.muon_optimizer", "lightning", "torchmetrics"),
    *("transformers.trainer", "transformers.models.bert.modeling_bert"),
)
_began_with = dict(os.environ)
_set: dict[str, str] = {}  # variables, by the imports
_LENGTH = struct.Struct("<q")


class Server:
    """Forks children for those who connect to `listener`.

    Attributes:
        children: connection -> pid of its child, as long as the caller lives.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.children: dict[socket.socket, int] = {}
        self._owned: dict[str, set[int]] = {}  # the children that end with a process, by its number
        self._decisive = _decisive(_began_with)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._end)  # whoever has started this one has ended

    def serve(self) -> dict[str, Any]:
        """What a child is to run; returns in children only."""
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # what came before it in this turn has ended it
                task = key.data(key.fileobj)
                if task is not None:
                    return task

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        connection, _ = listener.accept()
        connection.settimeout(5)
        caller, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            task, fds = _receive(connection)
        except (OSError, struct.error, ValueError):  # it was killed meanwhile
            connection.close()
            return None
        connection.settimeout(None)
        try:
            other = {kind for kind in _KINDS if _space("self", kind) != _space(caller, kind)}
        except OSError:  # it was killed, or is not seen from here
            other = set(_KINDS)
        same = (uid, _decisive(task["environ"])) == (os.geteuid(), self._decisive)
        if not same or not other <= _ENTERED.keys() or (other and uid):
            return self._refuse(connection, fds)
        try:
            pid = os.fork()
        except OSError:  # not now: no memory, or too many processes
            return self._refuse(connection, fds)
        if pid == 0:
            self._selector.close()
            for open_here in (listener, connection, *self.children):
                open_here.detach()
            if other:
                _enter(caller, other)
            _take_over(task, fds)
            return task
        with suppress(OSError):  # as it does itself: whoever comes first
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        ended = os.pidfd_open(pid)
        self.children[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ, self._lost)
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._ended(connection, pid, ended))
        if owner := task["environ"].get(_OWNER):
            self._end_with(owner, pid)
        with suppress(ConnectionError):  # it is lost in the next turn
            connection.sendall(_LENGTH.pack(pid))
        return None

    def _refuse(self, connection: socket.socket, fds: list[int]) -> None:
        """The caller starts a Python of its own."""
        with suppress(ConnectionError):
            connection.sendall(_LENGTH.pack(0))
        connection.close()
        for fd in fds:
            os.close(fd)

    def _end_with(self, owner: str, pid: int) -> None:
        """A child ends, at the latest, when the process `owner` ends, in whatever way."""
        if owner not in self._owned:
            try:
                ended = os.pidfd_open(int(owner))
            except OSError:  # it has ended
                _kill(pid)
                return
            self._owned[owner] = set()
            self._selector.register(ended, selectors.EVENT_READ, lambda _: self._owner_ended(owner, ended))
        self._owned[owner].add(pid)

    def _owner_ended(self, owner: str, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        for pid in self._owned.pop(owner) & set(self.children.values()):
            _kill(pid)

    def _lost(self, connection: socket.socket) -> None:
        """The caller was killed: so is its child, and what that has forked."""
        self._selector.unregister(connection)
        _kill(self.children.pop(connection))
        connection.close()

    def _ended(self, connection: socket.socket, pid: int, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        for pids in self._owned.values():  # a later process may have this number
            pids.discard(pid)
        if self.children.pop(connection, None) is not None:
            self._selector.unregister(connection)
            try:
                connection.sendall(_LENGTH.pack(status))
            except ConnectionError:  # killed at this moment
                _kill(pid)
            connection.close()

    def _end(self, _: int) -> None:
        for pid in self.children.values():
            _kill(pid)
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        sys.exit()


def _decisive(environ: Any) -> dict[str, str]:
    """The variables with other values of which the imports might have gone otherwise. Where a fork starts another one,
    there are those that the imports have set."""
    read = [name for name in environ if name.startswith(_IMPORTED) and not name.startswith(_LATER)]
    found = {name: environ[name] for name in read if _set.get(name) != environ[name]}
    path = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", _HERE)]
    return {**found, "PYTHONPATH": os.pathsep.join(path)}


def _space(process: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{process}/ns/{kind}")


def _enter(process: int, kinds: set[str]) -> None:
    """Go into the namespaces of a process, such as those of a host of cluster/hosts.py."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.pidfd_open(process)
    if libc.setns(fd, sum(_ENTERED[kind] for kind in kinds)):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 253)
    try:
        (length,) = _LENGTH.unpack(head)
        with connection.makefile("rb") as stream:
            return json.loads(stream.read(length)), list(fds)
    except BaseException:  # else what the caller was about to print to would never be closed
        for fd in fds:
            os.close(fd)
        raise


def _take_over(task: dict[str, Any], fds: list[int]) -> None:
    """Become what the caller is."""
    os.setpgid(0, 0)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
    os.closerange(0, _HIGH)
    for fd, place in zip(high, task["fds"], strict=True):
        if place >= 0:
            os.dup2(fd, place)
        else:
            os.fchdir(fd)
    os.closerange(_HIGH, max(high) + 1)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called after the handlers of what it loads itself, and before those of torch
    for name, limits in task["limits"]:
        resource.setrlimit(name, limits)
    os.sched_setaffinity(0, task["cores"])
    with suppress(OSError):  # one that has a priority of its own
        os.sched_setscheduler(0, task["policy"], os.sched_param(0))
    os.umask(task["umask"])
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = (  # type: ignore[misc]
        *(_stream(0, "r"), _stream(1, "w"), _stream(2, "w")),
    )
    os.environ.clear()
    os.environ.update({**_set, **task["environ"]})
    tempfile.tempdir = None
    importlib.reload(forks)  # its memory is shared by the forks of those who have imported it
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].distributed.set_debug_level_from_env()


def _stream(fd: int, mode: str) -> TextIO | None:
    """As Python opens it when it begins."""
    try:
        buffering = 1 if fd == 2 or os.isatty(fd) else -1
        return open(fd, mode, buffering, errors="backslashreplace" if fd == 2 else None, closefd=False)
    except OSError:  # it is closed
        return None


_loaded: dict[str, Any] = {}  # the modules that a fork begins with


def _leave() -> None:
    """As Python ends, the last of its handlers: what it does not find in sys.modules, it does not take apart."""
    for name in _loaded:
        sys.modules[name] = None  # type: ignore[assignment]


def _prepare(arguments: list[str]) -> tuple[types.ModuleType, Any]:
    """The new module __main__, and what is to be executed in it, the code of a program or the name of a module."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if _HERE in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.path.insert(1, _HERE)
    kind = arguments[0]
    if kind in ("-c", "-m"):
        sys.argv, sys.path[0] = [kind, *arguments[2:]], "" if kind == "-c" else os.getcwd()
        return main, compile(arguments[1], "<string>", "exec") if kind == "-c" else arguments[1]
    main.__file__ = kind
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(kind))
    with open(kind, "rb") as file:
        return main, compile(file.read(), kind, "exec")


if __name__ == "__main__":
    atexit.register(_leave)  # first, so that it comes last
    for name in (*_TORCH, *(_CLIENTS if find_spec("deepspeed") else ())):
        importlib.import_module(name)
    _set |= {name: value for name, value in os.environ.items() if _began_with.get(name) != value}
    _loaded |= {name: module for name, module in sys.modules.items() if name not in ("sys", "builtins", "__main__")}
    _loaded["_loaded"] = _loaded  # a cycle, which keeps them: no collection looks at what is frozen
    for registered in weakref.finalize._registry:  # what torch registered with itself, and would undo piece by piece
        registered.atexit = False
    from hpcdist.process import forks

    gc.freeze()  # the collections at the end of a program do not go through all of torch
    # As deep in the stack as a program is: hpcdist looks at the outermost frame, and shows those of the user.
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    task = server.serve()
    del server
    main, program = _prepare(task["arguments"])
    del task
    if isinstance(program, str):
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]  # as python -m does
    else:
        exec(program, vars(main))
