"""The command ``python -m hpcdist.gather``."""

from hpcdist.commands.arrays import join_main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser("gather"), join_main)
