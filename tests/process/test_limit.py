"""The time limit of native code that holds Python's lock; it leaves the program's own timers and handlers alone."""

import signal
import subprocess
import sys

import pytest

CODE = """
import ctypes, faulthandler, os, signal, time
from hpcdist.process.limit import ended_after
{before}
faulthandler.dump_traceback_later(2)  # the program's own
with ended_after(0.5): pass
ctypes.PyDLL(None).sleep(1)
os.write(1, b"alive")
time.sleep(2)
def stuck(): ctypes.PyDLL(None).sleep(1000)
with ended_after(0.25): stuck()
"""


@pytest.mark.parametrize(
    ("before", "number"),
    [("", signal.SIGALRM), ("signal.signal(signal.SIGALRM, lambda *_: None)", signal.SIGRTMAX)],
)
def test_a_process_that_is_stuck_ends_and_says_where(before, number):
    command = [sys.executable, "-c", CODE.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (-number, "alive"), done
    assert "Timeout (0:00:02)!" in done.stderr  # of faulthandler
    assert "in stuck" in done.stderr.rpartition("Timeout")[2]
