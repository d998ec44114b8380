"""The command ``hpcdist`` alone: list the commands and the versions in use."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from hpcdist import staging
from hpcdist.__main__ import COMMANDS
from hpcdist.runtime.cli import run
from hpcdist.runtime.commandline import Parser, plural
from hpcdist.runtime.world import World
from hpcdist.tensors import accelerator

_PACKAGES = ("hpcdist", "torch", "mpi4py", "numpy", "h5py", "safetensors", "xxhash")


def main(world: World, args: argparse.Namespace) -> int:
    """Print on rank 0; return the exit status."""
    import h5py
    from mpi4py import MPI

    if world.rank == 0:
        versions = [[name, _version(name)] for name in _PACKAGES]
        versions += [
            ["python", platform.python_version()],
            ["MPI", MPI.Get_library_version().split("\n")[0].strip("\0 ")],
            ["HDF5", f"{h5py.version.hdf5_version} ({'parallel' if h5py.get_config().mpi else 'serial'})"],
            ["staging", f"writer {staging.writer()[0]}: {staging.writer()[1]}; route hdf5 in {world.staging}"],
            [accelerator.LIBRARY.upper(), accelerator.library_version() if accelerator.count() else "no GPU"],
            ["ranks", f"{world.world_size} on {plural(world.nodes, 'node')}{_more(world)}"],
        ]
        width = max(len(name) for name, _ in versions)
        print("commands (see their --help):")
        print("\n".join(f"  hpcdist {name.ljust(width)}  {what}" for name, (what, *_) in COMMANDS.items()))
        print("versions in use:")
        print("\n".join(f"  {name.ljust(width)}  {value}" for name, value in versions), flush=True)
    return 0


def _more(world: World) -> str:
    return "" if world.world_size > 1 else " (mpirun -n 4 python -m hpcdist would start 4)"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def parser() -> Parser:
    """Return the parser of hpcdist without a command."""
    p = Parser(prog="hpcdist", description="List the commands of hpcdist and the versions in use.")
    p.add_argument("command", nargs="?", choices=COMMANDS, help="command to run; its --help shows its options")
    return p


if __name__ == "__main__":
    run(parser(), main)
