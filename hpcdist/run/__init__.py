"""The command ``python -m hpcdist.run SCRIPT``: run a program that is written for torchrun on the ranks of an MPI job."""
