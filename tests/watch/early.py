"""A rank that does not start MPI, or hangs after hpcdist's own end: ``early.py end|stop|late SECONDS FILE``.

Open MPI's mpirun ends the job itself if another rank has started MPI when one ends, so the others wait for that end.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from hpcdist.launch.launcher import number

WAYS = {
    "end": sys.exit,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda: atexit.register(time.sleep, 1000),  # runs after hpcdist's own handler
}

process = Path(sys.argv[3])  # the id of rank 1, once it has begun
if number(os.environ) == 1:
    process.write_text(str(os.getpid()))
    WAYS[sys.argv[1]]()
while sys.argv[1] == "end" and not (process.exists() and not Path("/proc", process.read_text()).exists()):
    time.sleep(0.01)

import hpcdist as hd  # noqa: E402

hd.init(timeout=float(sys.argv[2]))
