"""The command ``python -m hpcdist.run SCRIPT``: run a program for torchrun on the ranks of an MPI job."""
