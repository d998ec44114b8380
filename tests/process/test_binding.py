"""Binding to NUMA domains: on made-up trees of /sys, and in a job."""

import os

import pytest
from launch import mpirun

from hpcdist.process import machine
from hpcdist.process.machine import beside, choose, domains

ALL = set(range(8))
TWO = [{0, 1, 4, 5}, {2, 3, 6, 7}]  # with hardware threads, as Linux numbers them
NO_GPU = set()


def test_what_linux_lists(tmp_path, monkeypatch):
    """In the order of their numbers, without domains of memory alone."""
    node, pci = "devices/system/node", "bus/pci/devices"
    files = {
        f"{node}/node10/cpulist": "6-7\n",
        f"{node}/node2/cpulist": "0-1,4\n",
        f"{node}/node3/cpulist": "\n",
        f"{node}/online": "2-3,10\n",
        f"{pci}/0000:3b:00.0/local_cpulist": "6-7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "SYS", tmp_path)
    assert domains() == [{0, 1, 4}, {6, 7}]
    assert beside("0000:3b:00") == {6, 7}
    assert beside("0000:5e:00") == beside("") == set()
    monkeypatch.setattr(machine, "SYS", tmp_path / "absent")
    assert domains() == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # GPUs, in whatever order of domains; several ranks may be beside one
        ([(ALL, TWO[1]), (ALL, TWO[0]), (ALL, TWO[1])], [TWO[1], TWO[0], TWO[1]]),
        # no GPUs: blocks
        ([(ALL, NO_GPU)] * 3, [TWO[0], TWO[0], TWO[1]]),
        # inside a set that the ranks share, such as that of a Slurm job on half of a node
        ([({1, 2, 3}, NO_GPU)] * 2, [{1}, {2, 3}]),
        # a GPU beside none of its cores
        ([({0, 1}, TWO[1])] * 2, [{0, 1}] * 2),
        # bound by the launcher: to cores of its own, across domains, wherever the GPU is
        ([({0, 2}, TWO[1]), ({1, 3}, TWO[0])], [{0, 2}, {1, 3}]),
        # one is bound, others are not
        ([({0}, NO_GPU), ({1, 2, 3}, NO_GPU), ({1, 2, 3}, NO_GPU)], [{0}, {1, 2, 3}, {1, 2, 3}]),
        # bound to sets that some of them share: two ranks each in a half of the node, with a domain for each rank
        ([({0, 1, 2, 3}, {0, 1})] * 2 + [({4, 5, 6, 7}, {4, 5})] * 2, [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2),
        # and to sets that overlap
        ([({0, 1, 2}, NO_GPU), ({1, 2, 3}, NO_GPU)], [{0, 1, 2}, {1, 2, 3}]),
        # GPUs on some ranks
        ([(ALL, TWO[1]), (ALL, NO_GPU)], [TWO[1], TWO[1]]),
    ],
)
def test_the_choice(ranks, expected):
    assert choose(ranks, TWO) == expected
    assert all(chosen <= own for chosen, (own, _) in zip(expected, ranks, strict=True))


def test_a_system_that_lists_no_domains_binds_nothing():
    assert choose([(ALL, NO_GPU), ({0, 1}, NO_GPU)], []) == [ALL, {0, 1}]


def test_init_binds_every_thread_and_refuses_another_word():
    done = mpirun(
        2,
        code="""
    import os
    import hpcdist as hd
    from hpcdist.process import machine
    machine.domains = lambda: [{core} for core in sorted(os.sched_getaffinity(0))]
    try: hd.init(bind="cores")
    except hd.RankError as error: assert "expected 'numa' or None [HD114]" in str(error), error
    before = sorted(os.sched_getaffinity(0))
    world = hd.init(bind="numa")
    found = {tuple(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
    assert found == {(before[world.rank * len(before) // 2],)}, found
    """,
    )
    assert done.status == 0 or len(os.sched_getaffinity(0)) < 2, done.err
