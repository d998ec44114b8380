"""Find what is wrong with a job and how to fix it: ``python -m hpcdist.doctor``, under mpirun, srun or alone.

Every rank collects facts, which are plain data: facts.py, what it knows alone, and examine.py, what the ranks find out
together. Checks are pure functions of facts, in one table: table.py and checks.py. The examination runs in a child of
each process (supervisor.py), so that the doctor survives an MPI library that hangs or kills its process.
"""
