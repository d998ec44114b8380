"""``python -SE forked.py FOLDER ARGUMENTS``: as ``python ARGUMENTS``, by a fork of forkserver.py. It hands over what it
has, and ends as that does."""

import json
import os
import resource
import signal
import socket
import struct
import sys

_LENGTH = struct.Struct("<q")
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main(server: str, arguments: list[str]) -> None:
    """Ask for a fork, pass signals on to it, and end as it has ended."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-u")):
        os.execv(sys.executable, [sys.executable, *arguments])
    ranks = [os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") if name in os.environ]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(server, str(int(ranks[0]) % 2 if ranks else 0)))
    listed = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    fds = [fd for fd in listed if fd != connection.fileno()]
    os.umask(umask := os.umask(0))
    names = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    message = json.dumps(
        {
            "arguments": arguments,
            "environ": dict(os.environ),
            "fds": [*fds, -1],
            "cores": list(os.sched_getaffinity(0)),
            "policy": os.sched_getscheduler(0),
            "umask": umask,
            "limits": [(name, resource.getrlimit(name)) for name in names],
        }
    ).encode()
    folder = os.open(".", os.O_RDONLY)
    socket.send_fds(connection, [_LENGTH.pack(len(message))], [*fds, folder])
    connection.sendall(message)
    child = _number(connection)
    if child == 0:  # not such a one: see _decisive
        os.execv(sys.executable, [sys.executable, *arguments])
    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, _: _pass_on(child, number))
    status = _number(connection)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _pass_on(child: int, number: int) -> None:
    try:  # noqa: SIM105  an import of contextlib takes longer than all else here
        os.kill(child, number)
    except ProcessLookupError:  # it has just ended
        pass


def _number(connection: socket.socket) -> int:
    try:
        data = connection.recv(_LENGTH.size)
    except ConnectionError:
        data = b""
    if not data:  # the tests have ended
        os.kill(os.getpid(), signal.SIGKILL)
    return int(_LENGTH.unpack(data)[0])


main(sys.argv[1], sys.argv[2:])
