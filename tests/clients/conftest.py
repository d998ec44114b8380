"""The libraries are in the environment `libraries` alone."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
