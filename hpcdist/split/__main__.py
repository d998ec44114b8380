"""The command ``python -m hpcdist.split``."""

from hpcdist.commands.arrays import parser, split_main
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser("split"), split_main)
