"""A shared file system that is slow, for benchmarks: an SFTP server whose rates all clients share; sshfs mounts it.

python benchmarks/file_server.py --folder DIR --port 7000 --requests 1000 --bandwidth 104857600
sshfs -o directport=7000 HOST:/ MOUNTPOINT                  on each client; needs sshfs and openssh-sftp-server

Each client has a connection with an sftp-server of its own. Requests that are no data (open, close, attributes, names)
take turns at `--requests` a second, data at `--bandwidth` bytes a second. When it is terminated it prints as JSON how
many requests and bytes there were.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_READ, _WRITE = 5, 6  # SSH_FXP_READ and SSH_FXP_WRITE
_LENGTH = struct.Struct(">I")
_CHUNK = 2**18


class Bucket:
    """Lets `rate` a second through, for all threads together; what was not used in the last 10 ms may follow."""

    def __init__(self, rate: float) -> None:
        self.total = 0
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until it is the turn of `count` more."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - 0.01) + count / self._rate
            self.total += count
            wait = self._next - now
        if wait > 0:
            time.sleep(wait)


def requests(client: socket.socket, server: int, bucket: Bucket) -> None:
    """Pass on the packets of a client, each in its turn."""
    with client.makefile("rb", _CHUNK) as stream, os.fdopen(server, "wb") as out:
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            packet = stream.read(_LENGTH.unpack(head)[0])
            if packet[:1] and packet[0] not in (_READ, _WRITE):
                bucket.take(1)
            out.write(head + packet)
            out.flush()


def answers(server: int, client: socket.socket, bucket: Bucket) -> None:
    """Pass on what the server says."""
    while data := os.read(server, _CHUNK):
        bucket.take(len(data))
        client.sendall(data)
    client.close()


def serve(folder: Path, port: int, rates: tuple[float, float]) -> None:
    """Serve a folder, read-only, until a SIGTERM."""
    program = next(path for path in SERVERS if os.path.exists(path))
    operations, data = Bucket(rates[0]), Bucket(rates[1])

    def end(*_: object) -> None:
        print(json.dumps({"requests": operations.total, "bytes": data.total}), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    listener = socket.create_server(("", port))
    print("listening", flush=True)
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        process = subprocess.Popen(
            [program, "-R", "-e"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None and process.stdout is not None
        for step, *args in (
            (requests, client, os.dup(process.stdin.fileno()), operations),
            (answers, os.dup(process.stdout.fileno()), client, data),
        ):
            threading.Thread(target=step, args=args, daemon=True).start()
        process.stdin.close()
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=7000)
    parser.add_argument("--requests", type=float, default=1000, help="a second (1000)")
    parser.add_argument("--bandwidth", type=int, default=100 * 2**20, help="bytes a second")
    asked = parser.parse_args()
    serve(asked.folder, asked.port, (asked.requests, asked.bandwidth))
    return 0


if __name__ == "__main__":
    sys.exit(main())
