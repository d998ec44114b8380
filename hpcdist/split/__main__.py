"""The command ``python -m hpcdist.split``."""

from hpcdist.commands.arrays import split_main, split_parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(split_parser(), split_main)
