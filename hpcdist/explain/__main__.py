"""The command ``python -m hpcdist.explain``."""

import sys

from hpcdist.explain.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
