"""The command ``python -m hpcdist.convert``."""

from hpcdist.commands.conversion import main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser(), main)
