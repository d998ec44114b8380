"""A rank that does not start MPI, or hangs after hpcdist's own end: ``early.py end|stop|late SECONDS``."""

import atexit
import os
import signal
import sys
import time

from hpcdist.launch.launcher import number

WAYS = {
    "end": sys.exit,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda: atexit.register(time.sleep, 1000),  # runs after hpcdist's own handler
}

if number(os.environ) == 1:
    WAYS[sys.argv[1]]()

import hpcdist as hd  # noqa: E402

hd.init(timeout=float(sys.argv[2]))
