"""Child processes: those that were forked while MPI ran cannot use it and are told so; all others are left alone."""

import pytest
from launch import mpirun

BEFORE = """
    import multiprocessing, os, time
    import torch
    import hpcdist as hd

    fork = multiprocessing.get_context("fork")
    first, second = fork.Event(), fork.Event()
    def child():
        if {both}: first.wait(30)
        try: hd.init()
        except hd.LaunchError as error: os.write(1, f"{{error}}\\n".encode())
        else:
            assert hd.concat(torch.ones(1)).tolist() == [1] * hd.current().world_size
            os.write(1, b"child\\n")
            hd.finalize()
            from mpi4py import MPI
            MPI.Finalize()
        second.set()
    started = fork.Process(target=child)
    started.start()
    if {both}:
        world = hd.init()
        first.set()
        second.wait(30)
        assert hd.concat(torch.ones(1)).tolist() == [1, 1]
        os.write(1, b"parent\\n")
    started.join()
    assert started.exitcode == 0
"""


CHILDREN = """
    from torch.utils.data import DataLoader
    from mpi4py import MPI

    hd.finalize()
    def say(text): os.write(1, (text + "\\n").encode())
    def refused(what, step):
        try: step()
        except hd.HpcdistError as error:
            say(f"{what} {type(error).__name__} {'forked while MPI ran in its parent' in str(error)}")
    def in_child(*steps):
        child = fork.Process(target=lambda: [refused(*step) for step in steps])
        child.start(); child.join(30)
        assert child.exitcode == 0, child.exitcode

    in_child(("init-early", hd.init))
    world = hd.init()
    x = torch.ones(1)
    plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
    handle = hd.irecv(1 - world.rank)
    in_child(
        ("concat", lambda: hd.concat(x)), ("current", hd.current), ("init", hd.init), ("plan", lambda: plan(x)),
        ("self", lambda: hd.init(MPI.COMM_SELF)), ("wait", handle.wait), ("send", lambda: hd.send(x, 0)),
        ("finalize", lambda: (world.finalize(), hd.finalize(), say("finalized"))),
    )
    loader = DataLoader(list(range(8)), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == list(range(8))
    pid = os.fork()
    if pid == 0: os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    hd.isend(x, 1 - world.rank).wait()
    assert handle.wait().tolist() == [1] and hd.concat(x).tolist() == [1, 1]
    say("sent")
"""


def test_of_a_process_and_its_child_one_is_a_rank():
    """A child that was forked while MPI ran is refused, too."""
    job = mpirun(2, code=BEFORE.format(both=True) + CHILDREN)
    assert (job.status, job.err) == (0, ""), job
    lines = [line if "already" not in line else "already" for line in job.out.splitlines()]
    local = ("concat", "current", "plan", "wait", "send")
    expected = [f"{what} HpcdistError True" for what in local]
    expected += [f"{what} LaunchError True" for what in ("init-early", "init", "self")]
    assert sorted(lines) == sorted([*expected, "already", "parent", "finalized", "sent"] * 2), job.out


def test_the_child_alone_may_be_the_rank():
    assert mpirun(2, code=BEFORE.format(both=False)).out.count("child\n") == 2


def test_children_without_a_launcher_are_worlds_of_their_own():
    code = """
        import multiprocessing, os, torch, hpcdist as hd
        def child():
            with hd.init(): assert hd.concat(torch.ones(1)).tolist() == [1]
            os.write(1, b"child\\n")
        for _ in range(2):
            two = [multiprocessing.get_context("fork").Process(target=child) for _ in range(2)]
            for p in two: p.start()
            for p in two: p.join()
    """
    assert mpirun(0, code=code).out.count("child\n") == 4


@pytest.mark.parametrize("variable", ["PMI_FD", ""])
def test_a_process_that_can_be_no_rank_is_told_so(variable):
    """A program that a rank of MPICH's has started, without its connection to the launcher; and MPI that has ended."""
    code = (
        "import hpcdist\nhpcdist.init()"
        if variable
        else "import hpcdist\nfrom mpi4py import MPI\nMPI.Finalize()\nhpcdist.init()"
    )
    job = mpirun(0, code=code, env={variable: "999"} if variable else {}, quick=False)
    assert job.status == 1
    expected = "LaunchError: PMI_FD=999, by which this process" if variable else "LaunchError: MPI has ended"
    assert expected in job.err
