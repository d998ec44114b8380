"""``raising.py PROGRAM ARGUMENTS``: run a program whose rank 1 fails before its second step."""

import os
import runpy
import sys
from itertools import count

from torch.optim.optimizer import register_optimizer_step_pre_hook

steps = count(1)


def fail(*_):
    if next(steps) == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no second step")


register_optimizer_step_pre_hook(fail)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
