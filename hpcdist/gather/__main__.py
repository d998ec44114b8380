"""The command ``python -m hpcdist.gather``."""

from hpcdist.commands.arrays import gather_main, gather_parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(gather_parser(), gather_main)
