"""A signal's handler that raises inside a call: the rank would be out of step, so the job ends, and says why."""

import pytest
from launch import mpirun

BEGIN = """
import os, signal, sys, time, torch, hpcdist as hd
world = hd.init()
x = torch.full((3,), float(world.rank))
plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
hd.concat(x)
class LateError(Exception): pass
def handler(*_): raise LateError("too late")
signal.signal(signal.SIGALRM, handler)
def within(seconds, step):
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return step()
    except LateError as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize(
    ("name", "call"), [("a plan of redistribute", "plan(x)"), ("concat", "hd.concat(x)"), ("finalize", "hd.finalize()")]
)
def test_in_a_collective(name, call):
    """Rank 0 gets it while it waits for rank 1, and catches the error: without an end the next call would hang, or take
    the data of this one."""
    code = f"""
if world.rank == 1:
    time.sleep(1.5)
print("caught", within(0.5, lambda: {call}) if world.rank == 0 else {call})
print("next", hd.concat(x))
"""
    job = mpirun(2, code=BEGIN + code)
    assert job.status != 0
    assert "next" not in job.out
    reasons = ("was interrupted, which leaves this rank out of step", "failed in the middle of a transfer")
    assert any(f"hpcdist: {name}() {reason}" in job.err for reason in reasons), job.err
    assert "LateError: too late" in job.err


def test_outside_of_calls_and_sys_exit_in_a_handler():
    """recv waits where handlers run, and an error there, while nothing has come, costs nobody anything. Handlers of
    SIGTERM exit: the job ends with that status."""
    job = mpirun(
        2,
        code=BEGIN
        + """
if world.rank == 0:
    print("got", within(0.3, lambda: hd.recv(1)))
    print("got", within(0.3, lambda: time.sleep(5)))
    world.comm.Barrier()
    print("got", hd.recv(1), flush=True)
else:
    world.comm.Barrier()
    hd.send("a message", 0)
os.write(1, f"next {hd.concat(x).tolist()}\\n".encode())  # at once: mpirun may put two lines into one
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if world.rank == 0:
    import threading
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
else:
    time.sleep(1)
hd.concat(x)
time.sleep(20)
""",
    )
    assert job.status == 7, job.err
    assert job.out.count("got too late") == 2 and "got a message" in job.out
    assert job.out.count("next [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]") == 2
    assert "concat() was interrupted" in job.err
