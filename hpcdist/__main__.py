"""``python -m hpcdist``: list the commands and the versions in use."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from hpcdist import staging
from hpcdist.comm.devices import nccl_version
from hpcdist.runtime.cli import Parser, plural, run
from hpcdist.runtime.world import World

_COMMANDS = [
    ["python -m hpcdist.gather", "join arrays from files over the ranks of a job"],
    ["python -m hpcdist.concat", "the same, with the result on every rank"],
    ["python -m hpcdist.split", "split an array in a file into parts in files of their own"],
    ["python -m hpcdist.convert", "copy all tensors of a file or folder to another format"],
    ["python -m hpcdist.explain", "what the code at the end of an error means, and what to do"],
    ["python -m hpcdist.doctor", "find what is wrong with this job, and how to fix it"],
    ["python -m hpcdist.staging", "ls, verify: list a file or folder, and compare it with its checksums"],
    ["python -m hpcdist.stage_env", "copy an environment to every node's own disk, over MPI"],
    ["python -m hpcdist.jobscript", "write a job script for Slurm, PBS, Flux or LSF"],
]
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
            ["NCCL", _nccl()],
            ["ranks", f"{world.world_size} on {plural(world.nodes, 'node')}{_more(world)}"],
        ]
        width = max(len(name) for name, _ in versions)
        print("commands (see their --help):")
        print("\n".join(f"  {command.ljust(27)}  {what}" for command, what in _COMMANDS))
        print("versions in use:")
        print("\n".join(f"  {name.ljust(width)}  {value}" for name, value in versions), flush=True)
    return 0


def _more(world: World) -> str:
    return "" if world.world_size > 1 else " (mpirun -n 4 python -m hpcdist would start 4)"


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    return nccl_version()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    run(Parser(prog="hpcdist", description="List the commands of hpcdist and the versions in use."), main)
