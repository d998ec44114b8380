"""The command ``python -m hpcdist.concat``."""

from hpcdist.commands.arrays import concat_main, concat_parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(concat_parser(), concat_main)
