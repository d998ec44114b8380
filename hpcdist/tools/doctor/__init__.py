"""Diagnose a job, and name the fixes: ``python -m hpcdist doctor``, under mpirun, srun or alone.

Every rank collects facts, which are plain data (examine.py). Checks are pure functions of facts, in one table
(checks.py). The examination runs in a child of each process (__main__.py), so that the doctor survives an MPI library
that hangs.
"""
