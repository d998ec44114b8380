"""Start the ranks of the tests' jobs without the 2 s of CPU time that each would need to import torch and to end.

:func:`python` starts two servers, which import torch once. ``forks.py run FOLDER ARGUMENTS`` then stands for ``python
ARGUMENTS``. It hands over its descriptors, variables and folder, and ends as the fork ends. If it is killed, so is the
fork. On a host of cluster/hosts.py the fork enters its namespaces. A process with other variables that imports read, or
of another user, runs as a true Python.
"""

import json
import os
import resource
import signal
import socket
import sys

READ_BY_IMPORTS = ("PYTHON", "LD_PRELOAD", "MALLOC_", "GLIBC_", "LC_", "LANG", "OMP_", "MKL_", "TORCH_DISTRIBUTED")
SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
ENTERED = {"ipc": 0x08000000, "mnt": 0x00020000, "net": 0x40000000, "uts": 0x04000000}  # of cluster/hosts.py
PRELOADED = (
    *("torch._dynamo", "torch.distributed._functional_collectives", "torch.distributed.checkpoint"),
    *("torch.nn.parallel.distributed", "numpy"),
    *("accelerate", "datasets", "lightning", "torchmetrics", "transformers.trainer"),  # where tests/clients run
)
servers = []
HERE = os.path.dirname(os.path.realpath(__file__))
HIGH = 512  # descriptors from here on are free while those of the caller take their places


def python(executable, folder, environ):
    """Start the servers, which end with this process; returns the words that stand for `executable`."""
    import subprocess

    for name in ("0", "1"):  # even and odd ranks have hash seeds of their own, as true processes do
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{name}")
            listener.listen(64)
            words = [executable, __file__, "serve", str(listener.fileno())]
            fds = [listener.fileno()]
            started = subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
            servers.append(started)  # with the pipe whose end ends it
    return [executable, "-SE", __file__, "run", folder]


def run(folder, arguments):
    """In place of ``python ARGUMENTS``: ask for a fork, pass signals on to it, and end as it ends."""
    rank = next((os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") if n in os.environ), "0")
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{folder}/{int(rank) % 2}")
    fds = [int(n) for n in os.listdir("/proc/self/fd") if int(n) != server.fileno() and os.path.exists(f"/dev/fd/{n}")]
    task = json.dumps([arguments, dict(os.environ), fds, os.getcwd()]).encode()
    socket.send_fds(server, [len(task).to_bytes(8, "little")], fds)
    server.sendall(task)
    child = int.from_bytes(server.recv(8), "little")
    if child == 0:
        os.execv(sys.executable, [sys.executable, *arguments])
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT"):
        signal.signal(getattr(signal, f"SIG{name}"), lambda number, _: os.kill(child, number))
    status = int.from_bytes(server.recv(8) or b"\x09", "little")  # nothing: the tests have ended
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))


def serve(listener):
    """Fork for each caller a process that keeps the fork; returns in the forks, with their arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who keeps a fork is not waited for
    while True:
        if 0 in select.select([0, listener], [], [])[0]:
            os._exit(0)  # the tests have ended
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(connection)
        connection.close()


def keep(connection):
    """Fork, and kill the fork when its caller or the tests end; returns in the fork."""
    caller, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        head, fds, _, _ = socket.recv_fds(connection, 8, 253)
        with connection.makefile("rb") as stream:
            arguments, environ, places, cwd = json.loads(stream.read(int.from_bytes(head, "little")))
        here, there = ([os.readlink(f"/proc/{pid}/ns/{space}") for space in SPACES] for pid in ("self", caller))
        host = os.pidfd_open(caller)
    except (OSError, ValueError):  # it was killed meanwhile
        os._exit(0)
    other = {space for space, mine, its in zip(SPACES, here, there, strict=True) if mine != its}
    if uid != os.getuid() or decisive(STARTED_WITH) != decisive(environ) or not other <= ENTERED.keys():
        connection.sendall(bytes(8))  # the caller starts a true Python
        os._exit(0)
    child = os.fork()
    if child == 0:
        if other and ctypes.CDLL(None).setns(host, sum(ENTERED[space] for space in other)):
            raise OSError("setns")
        take_over(caller, environ, fds, places, cwd)
        return list(arguments)
    connection.sendall(child.to_bytes(8, "little"))
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(child)
    if ended not in select.select([0, connection, ended], [], [])[0]:
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ConnectionError):
        connection.sendall(status.to_bytes(8, "little"))
    os._exit(0)


def decisive(environ):
    """Return the variables with which imports might go otherwise; this folder is no reason."""
    read = {name: value for name, value in environ.items() if name.startswith(READ_BY_IMPORTS)}
    return read if read.get("PYTHONPATH") != HERE else {name: read[name] for name in read if name != "PYTHONPATH"}


def take_over(caller, environ, fds, places, cwd):
    """Become what the caller is."""
    os.setpgid(0, 0)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in fds]
    os.closerange(0, HIGH)
    for fd, place in zip(high, places, strict=True):
        os.dup2(fd, place)
    os.closerange(HIGH, max(high) + 1)
    os.chdir(cwd)
    for name in [name for name in dir(resource) if name.startswith("RLIMIT_")]:
        limit = getattr(resource, name)
        resource.setrlimit(limit, resource.prlimit(caller, limit))
    os.sched_setaffinity(0, os.sched_getaffinity(caller))
    os.environ.clear()
    os.environ.update({**SET_BY_IMPORTS, **environ})
    tempfile.tempdir = None
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        errors = "backslashreplace" if fd == 2 else None
        stream = None
        with contextlib.suppress(OSError):  # it is closed
            stream = open(fd, mode, 1 if fd == 2 or os.isatty(fd) else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # torch's libraries do not take themselves apart, for a quarter of a second


def prepare(arguments):
    """Return a new module __main__, and what to execute in it: the code of a program, or the name of a module."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)
    if os.environ.get("PYTHONPATH") == HERE:
        sys.path.insert(1, HERE)
    kind, *rest = arguments
    if kind == "-m":
        sys.argv, sys.path[0] = arguments[:1] + rest[1:], os.getcwd()
        return main, rest[0]
    if kind == "-c":
        sys.argv, sys.path[0] = arguments[:1] + rest[1:], ""
        return main, compile(rest[0], "<string>", "exec")
    sys.argv, sys.path[0], main.__file__ = arguments, os.path.dirname(os.path.realpath(kind)), kind
    with open(kind, "rb") as file:
        return main, compile(file.read(), kind, "exec")


if __name__ == "__main__" and sys.argv[1] == "run":
    if sys.argv[3][:1] == "-" and sys.argv[3] not in ("-c", "-m", "-u"):
        os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
    run(sys.argv[2], sys.argv[3:])
elif __name__ == "__main__":  # here, not in a function: a program is as deep in the stack as users' programs are
    import contextlib
    import ctypes
    import fcntl
    import gc
    import importlib
    import runpy
    import select
    import struct
    import tempfile
    import types

    STARTED_WITH = dict(os.environ)
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if STARTED_WITH.get(name) != value}
    gc.freeze()
    main, program = prepare(serve(socket.socket(fileno=int(sys.argv[2]))))
    if isinstance(program, str):
        runpy._run_module_as_main(program)  # as python -m does
    else:
        exec(program, vars(main))
