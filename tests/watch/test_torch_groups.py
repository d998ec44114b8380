"""The calls of torch's own groups in the record: by made-up hooks with any torch, and by its own from 2.14 on."""

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import mpirun

from hpcdist import activity
from hpcdist.activity import ANYBODY, InCall, SharedRecord, start
from hpcdist.runtime.registration import PLUGINS
from hpcdist.watch.torch_groups import TorchGroup

PROGRAM = str(Path(__file__).with_name("gloo_groups.py"))


class Made:
    """A group with backends "cpu:gloo,cuda:nccl"."""

    def __init__(self, backends):
        self._device_types = [torch.device(kind) for kind in backends]
        self._backends = backends

    def _get_backend(self, device):
        options = SimpleNamespace(_timeout=timedelta(seconds=8))
        return SimpleNamespace(name=lambda: self._backends[device.type], options=options)


@pytest.fixture
def calls(monkeypatch):
    """Makes groups whose calls are recorded in this process."""
    start(SharedRecord(1))
    kept = []

    def make(backends):
        group = Made(backends)
        kept.append(group)
        group.group_name = "made"
        monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
        return TorchGroup(group)

    monkeypatch.setattr(activity, "shortest", 1000.0)
    monkeypatch.setattr(activity, "peers", {})
    yield make
    start(None)


def hook(name="ALLREDUCE", device="cpu", root=-1, work=None):
    tensors = [torch.empty(1, device=device)]
    return SimpleNamespace(
        name=SimpleNamespace(name=name), input_tensors=tensors, output_tensors=[], root=root, op_id=3, work=work
    )


class Work:
    done = False

    def is_completed(self):
        return self.done


def test_a_call_on_the_cpu_lasts_until_its_work_is_done(calls):
    group, work = calls({"cpu": "gloo"}), Work()
    group.begin(hook())
    record = activity.thread_records[0]
    assert record.patient  # it may be refused
    group.end(hook(work=work))
    call = record.current()
    assert (call.team, call.number, call.text.split(" at ")[0]) == (group.number, 1, "all_reduce() of gloo")
    assert (record.patient, record.limit, activity.shortest, activity.peers[group.number]) == (False, 6.0, 6.0, [0, 1])
    record.settle()
    assert record.current() is not None
    work.done = True
    record.settle()
    assert record.current() is None
    assert record.work is None  # which keeps tensors alive
    record.settle()
    assert (record.begun, record.finished) == (1, 1)


def test_the_next_call_takes_the_place_of_one_that_nobody_waits_for(calls):
    group, work = calls({"cpu": "gloo"}), Work()
    group.begin(hook())
    group.end(hook(work=work))
    record = activity.thread_records[0]
    with InCall("concat", None):
        work.done = True
        record.settle()  # the watching thread's look at what was the call before
        assert record.current() is not None
        group.begin(hook())  # within a call of this library, which says it all
        group.end(hook(work=Work()))
        assert record.begun == 2
    assert record.current() is None


def test_messages_have_no_deadline(calls):
    group = calls({"cpu": "gloo"})
    for root, number in ((1, -2), (-1, -1 - ANYBODY)):
        group.begin(hook("RECV", root=root))
        group.end(hook("RECV", work=Work()))
        call = activity.thread_records[0].current()
        assert (call.number, call.text.split(" at ")[0]) == (number, "recv() of gloo")
        assert activity.thread_records[0].patient


def test_a_call_on_a_gpu_is_recorded_as_issued(calls):
    """ "meta" stands for the GPU: nothing but its name is looked at."""
    group = calls({"cpu": "gloo", "meta": "nccl"})
    group.begin(hook("ALLGATHER_BASE", device="meta"))
    group.end(hook("ALLGATHER_BASE", device="meta", work=Work()))
    record = activity.thread_records[0]
    assert (record.begun, record.finished, record.work) == (1, 1, None)
    text = bytes(record._memory).decode(errors="replace")
    assert "all_gather() issued to nccl at " in text


def test_this_package_s_backend_records_its_calls_itself(calls):
    group = calls({"cpu": "mpi", "meta": "nccl"})
    group.begin(hook())
    group.end(hook(work=Work()))
    assert activity.thread_records[0].begun == 0
    group.begin(hook(device="meta"))
    assert activity.thread_records[0].begun == 1


if PLUGINS:  # torch has hooks
    HUNG = r"HangError: all_reduce\(\) of gloo at .*gloo_groups.py:\d+ has waited(?s:.*)rank 1 .* has not reached"

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            *(("hang", HUNG), ("async", HUNG)),
            ("different", r"rank \d is in \w+\(\) of gloo at .*, not in \w+\(\) of gloo at"),
            ("alone", ""),  # for longer than the deadline
        ],
    )
    def test_a_hung_call_of_gloo_is_named(case, said):
        job = mpirun(2, PROGRAM, case)
        assert (job.status == 0, job.out.count("survived") == 2) == (not said, not said), job
        assert re.search(said, job.err), job.err
