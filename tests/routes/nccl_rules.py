"""A stand-in for NCCL that runs on CPU tensors, over gloo, and refuses what NCCL would not bear.

The rules are those of torch.distributed's documentation (batch_isend_irecv, all_gather) and of ProcessGroupNCCL: the
first operation of a group is joined by all its ranks, memory is contiguous and on one device, messages between ranks
are started within one group of calls, and no rank sends to itself.
"""

import torch
import torch.distributed as dist

from hpcdist.routes import c10d


class _Rules:
    """ProcessGroupNCCL as far as the routes use it, over a gloo group."""

    supports_coalescing = True

    def __init__(self, gloo):
        self._gloo = gloo
        self._joined = False
        self._started = None
        self.calls = []  # operations on the caller's stream, and (True) on one of NCCL's own

    def _check(self, *tensors):
        assert self._joined, "the first operation of a group must be joined by all its ranks"
        assert all(x.is_contiguous() for x in tensors), "memory that is not contiguous"
        assert len({x.device for x in tensors}) <= 1, "tensors on several devices"

    def allreduce(self, tensors):
        self._joined = True
        return self._gloo.allreduce(tensors)

    def _start_coalescing(self):
        assert self._started is None, "one group of calls within another"
        self._started = []

    def _end_coalescing(self):
        assert self._started, "an empty group of calls"
        works, self._started = self._started, None
        return _All(works)

    def send(self, tensors, rank, tag):
        self._message(self._gloo.send, tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        self._message(self._gloo.recv, tensors, rank, tag)

    def _message(self, start, tensors, rank, tag):
        self._check(*tensors)
        assert self._started is not None, "a message outside a group of calls"
        assert rank != self._gloo.rank(), "a rank that sends to itself"
        self._started.append(start(tensors, rank, tag))

    def _allgather_base(self, recv, send, options):
        self._check(recv, send)
        assert recv.numel() == send.numel() * self._gloo.size(), "sizes that differ"
        self.calls.append(options.asyncOp)
        assert recv.dtype == send.dtype, "dtypes that differ"
        rows = recv.view(self._gloo.size(), -1).view(torch.uint8)
        return self._done(self._gloo.allgather([list(rows.unbind())], [send.view(-1).view(torch.uint8)]), options)

    def _done(self, work, options):
        """What torch returns: nothing of an operation on the caller's stream."""
        if options.asyncOp:
            return work
        work.wait()
        return None

    def allgather(self, recvs, sends, options):
        """Of any sizes, as ProcessGroupNCCL does it: one broadcast for each rank."""
        (blocks,), (send,) = recvs, sends
        self._check(*blocks, send)
        self.calls.append(options.asyncOp)
        blocks[self._gloo.rank()].copy_(send)
        each = torch._C._distributed_c10d.BroadcastOptions()
        works = []
        for each.rootRank, block in enumerate(blocks):
            if block.numel():
                works.append(self._gloo.broadcast([block], each))
        return self._done(_All(works), options)

    def __getattr__(self, name):
        return getattr(self._gloo, name)


class _All:
    """Several operations that are waited for as one."""

    def __init__(self, works):
        self._works = works

    def wait(self):
        for work in self._works:
            work.wait()


class _StandIn(type(c10d.NCCL)):
    name = "the rules of nccl"
    made = 0  # groups: each has a name of its own in the store

    def make(self, store, team, timeout):
        store = dist.PrefixStore(str(self.made), store)
        _StandIn.made += 1  # also those of another algorithm
        group = _Rules(dist.ProcessGroupGloo(store, team.rank, team.size, timeout=timeout))
        self.warm_up(group, team)
        return group

    def forget(self, team):
        """Make the group of a team anew when it is next used."""
        team.torch_groups.pop(self.name, None)

    def missing(self, team):
        return None

    def carries(self, team, gpu):
        return not gpu


STAND_IN = _StandIn()
