"""The command ``python -m hpcdist.gather``."""

from hpcdist.commands.gather import main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser(), main)
