"""The command ``python -m hpcdist.split``."""

from hpcdist.commands.split import main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser(), main)
