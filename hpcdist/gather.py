"""The operation gather, and the command ``python -m hpcdist.gather``."""

from hpcdist.collectives.join import gather as gather

__path__: list[str] = []  # so that runpy does not warn of a module that hpcdist/__init__ has imported

if __name__ == "__main__":
    from hpcdist.commands.arrays import join_main, parser
    from hpcdist.runtime.cli import run

    run(parser("gather"), join_main)
