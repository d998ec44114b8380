"""The steps of sending and receiving a structure, over MPI or through a file: see :mod:`hpcdist.p2p.progress`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.context import Context
from hpcdist.comm.matching import Envelope, bytes_of, with_envelope
from hpcdist.comm.team import Group
from hpcdist.errors import FileError, HpcdistError, reason
from hpcdist.layout import limits
from hpcdist.p2p.progress import DONE, RecvTurn, Requests, SendTurn, Steps, Task
from hpcdist.process import abort
from hpcdist.routes.hdf5_files import Stage, fetch
from hpcdist.tensors import pool
from hpcdist.tensors.message import Contents, Header, Messages, check_memory, encode, parse
from hpcdist.tensors.storage import Scratch, as_bytes, row_major
from hpcdist.tensors.tree import Tree, decode, rebuild

__all__ = ["Outgoing", "by_file", "by_mpi", "receive"]

_ANSWER = 1024  # bytes of an error text at most, after a file was read


class Outgoing(NamedTuple):
    """A message to send: key of the group, world rank of the receiver, tag, and number of the message."""

    context: Context
    key: int
    dest: int
    tag: int
    number: int

    def turn(self, task: Task[Any] | None = None) -> SendTurn:
        """Return its turn among the messages to send."""
        return SendTurn((self.key, self.dest, self.tag), task)

    def send_first(self, content: Tensor) -> list[MPI.Request]:
        """Start sending the header with the small tensors."""
        envelope, *rest = with_envelope(self.key, self.tag, self.number, content)
        first = self.context.header_comm.Isend([bytes_of(envelope), MPI.BYTE], self.dest, 0)
        return [first, *(request for x in rest for request in self.send(x))]

    def send(self, x: Tensor) -> list[MPI.Request]:
        """Start sending bytes in host memory, in pieces."""
        comm, pieces = self.context.data_comm, layout.pieces(x.numel(), limits.PIECE)
        return [comm.Isend([bytes_of(x[at : at + n]), MPI.BYTE], self.dest, self.number) for at, n in pieces]


def by_mpi(outgoing: Outgoing, tree: Tree, contents: Contents) -> Steps[None]:
    """Send the header with the small tensors, then each large tensor."""
    messages = Messages(tree.tensors, contents, encode(tree.spec, contents))
    large = [*messages.rest, *(as_bytes(row_major(tree.tensors[i])) for i in contents.large)]
    longest = max((x.numel() for x in large if not x.is_cpu), default=0)
    chunk = Scratch(pinned=longest > 0).take([min(limits.WINDOW, longest)], torch.uint8)
    yield outgoing.turn()
    # No memory is allocated from here on: a receiver of the header depends on what follows.
    requests = outgoing.send_first(messages.first)
    for x in large:
        if not x.is_cpu:
            for start, length in layout.pieces(x.numel(), limits.WINDOW):
                chunk[:length].copy_(x[start : start + length])
                yield Requests(outgoing.send(chunk[:length]))
        else:
            requests += outgoing.send(x)
    yield Requests(requests)
    yield DONE


def by_file(outgoing: Outgoing, tree: Tree, contents: Contents) -> Steps[None]:
    """Write the large tensors to a file, send the header with the small ones; remove the file when it has been read."""
    context, sizes = outgoing.context, [contents.nbytes[i] for i in contents.large]
    stages: list[Stage] = []

    def write() -> Messages:
        stages.append(Stage(context.settings.staging, sum(sizes)))
        large = [as_bytes(row_major(tree.tensors[i].cpu())) for i in contents.large]
        stages[0].write(list(zip(layout.displs(sizes), large, strict=True)))
        header = encode(tree.spec, contents, file=stages[0].ticket(context.settings.one_system))
        return Messages(tree.tensors, contents, header)

    try:
        task = Task(write)
        answer = bytearray(_ANSWER)
        yield outgoing.turn(task)
        messages = task.result()
        requests = outgoing.send_first(messages.first)
        for rest in messages.rest:
            requests += outgoing.send(rest)
        requests.append(context.data_comm.Irecv([answer, MPI.BYTE], outgoing.dest, outgoing.number + 1))
        yield Requests(requests)
    finally:
        for stage in stages:
            stage.remove()
    yield DONE
    problem = answer.rstrip(b"\0").decode(errors="replace")
    if problem:
        raise FileError("HD410", f"send(): rank {outgoing.dest}: {problem}")


def receive(context: Context, group: Group, turn: RecvTurn, allow_pickle: bool) -> Steps[tuple[Any, int]]:
    """Receive the message that `turn` waits for; return its structure, and its source in `group`."""
    yield turn
    (envelope,) = turn.matched
    source, device, comm = group.peers.index(envelope.source), context.settings.device, context.data_comm
    if not 0 <= envelope.number < context.most_tag:
        raise HpcdistError("HD901", f"a message of rank {source} is damaged: its number is {envelope.number}")
    incoming = partial(_from_mpi, comm, envelope.source, envelope.number)
    with abort.InTransfer("recv", group.size if envelope.content is None else 1):
        check_memory(envelope.nbytes)
        content = envelope.content
        if content is None:
            content = pool.empty([envelope.nbytes], torch.uint8, "cpu", fixed=True)
            yield from incoming([(content, False)])
    header, packed = parse(content)
    with abort.InTransfer("recv", group.size if header.large or packed is None else 1):
        check_memory(sum(header.nbytes))
        if packed is None:
            packed = pool.empty([header.packed], torch.uint8, "cpu", fixed=True)
            yield from incoming([(packed, False)])
        buffers = header.unpack(packed, device)
        buffers.update({i: header.recv_buffer(i, device, fixed=True) for i in header.large})
    if "file" in header.more:
        yield from _from_file(comm, envelope, header, buffers)
    else:
        yield from incoming([(as_bytes(buffers[i]), header.metas[i].on_gpu) for i in header.large])
    yield DONE
    return rebuild(header.spec, lambda kind, i: decode(kind, buffers[i], allow_pickle)), source


def _from_mpi(comm: MPI.Intracomm, source: int, number: int, large: list[tuple[Tensor, bool]]) -> Steps[None]:
    """Receive the messages after a header; tensors from a GPU arrive in chunks."""
    requests, scratch = [], Scratch(pinned=True)
    for x, from_gpu in large:
        for start, length in layout.pieces(x.numel(), limits.WINDOW if from_gpu else limits.PIECE):
            piece = x[start : start + length]
            if not x.is_cpu:
                scratch.reset()
                chunk = scratch.take([length], torch.uint8)
                yield Requests([comm.Irecv([bytes_of(chunk), MPI.BYTE], source, number)])
                piece.copy_(chunk)
            else:
                requests.append(comm.Irecv([bytes_of(piece), MPI.BYTE], source, number))
    yield Requests(requests)


def _from_file(comm: MPI.Intracomm, envelope: Envelope, header: Header, buffers: dict[int, Tensor]) -> Steps[None]:
    """Read the large tensors, then answer the sender, which keeps the file until then."""
    problem = ""

    def read() -> None:
        starts = layout.displs([header.nbytes[i] for i in header.large])
        for start, i in zip(starts, header.large, strict=True):
            dtype, shape = buffers[i].dtype, buffers[i].shape
            host = buffers[i] if buffers[i].is_cpu else pool.empty(shape, dtype, "cpu", fixed=True)
            fetch(header.more["file"], [(start, as_bytes(host))])
            buffers[i] = host.to(buffers[i].device)

    task = Task(read)
    yield task
    try:
        task.result()
    except Exception as error:  # any error, since the sender waits for an answer
        problem = reason(error)
    answer = bytearray(problem.encode(errors="backslashreplace")[:_ANSWER])
    yield Requests([comm.Isend([answer, MPI.BYTE], envelope.source, envelope.number + 1)])
    if problem:
        raise FileError("HD410", f"recv(): {problem}")
