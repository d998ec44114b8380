"""What this machine says of its MPI: for scripts in which nothing is left to decide in the job."""

from __future__ import annotations

import re
import subprocess
import sys

from hpcdist.jobscript.schedulers import OTHER_PMIS, PMI_OF_IMAGES, PMIS
from hpcdist.jobscript.shape import Shape

__all__ = ["pmi"]

_SECONDS = 20.0
_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def pmi(shape: Shape) -> str:
    """Return the PMI of srun that the MPI library of the ranks understands; "default", the cluster's, if that is not
    known: mpi4py or srun is not here, or the library is in an Apptainer image."""
    if shape.pyxis:
        return PMI_OF_IMAGES
    if shape.apptainer:
        return "default"
    library = _printed([sys.executable, "-c", _VENDOR]).strip()
    listed = re.findall(r"\w+", _printed(["srun", "--mpi=list"]))
    return next((one for one in PMIS.get(library, OTHER_PMIS) if library and one in listed), "default")


def _printed(command: list[str]) -> str:
    """Return what a command prints; nothing if it fails or is not here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
