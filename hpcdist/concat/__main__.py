"""The command ``python -m hpcdist.concat``."""

from hpcdist.commands.arrays import join_main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser("concat"), join_main)
