"""The command ``python -m hpcdist.concat``."""

from hpcdist.commands.concat import main, parser
from hpcdist.runtime.cli import run

if __name__ == "__main__":
    run(parser(), main)
