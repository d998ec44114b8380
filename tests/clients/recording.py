"""``recording.py PROGRAM ARGUMENTS``: run a program, and write down the samples that its network sees: x[:, 0]."""

import os
import runpy
import sys

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


def record(module, inputs):
    if isinstance(module, torch.nn.Linear) and module.training:
        with open(f"seen-{os.environ['RANK']}.txt", "a") as file:
            print(*(int(row[0]) for row in inputs[0]), file=file)


register_module_forward_pre_hook(record)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
