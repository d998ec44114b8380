"""The operation split, and the command ``python -m hpcdist.split``."""

from hpcdist.collectives.split import split as split

__path__: list[str] = []  # so that runpy does not warn of a module that hpcdist/__init__ has imported

if __name__ == "__main__":
    from hpcdist.commands.arrays import parser, split_main
    from hpcdist.runtime.cli import run

    run(parser("split"), split_main)
