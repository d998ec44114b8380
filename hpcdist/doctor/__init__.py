"""Find what is wrong with a job and how to fix it: ``python -m hpcdist.doctor``, under mpirun, srun or alone.

Every rank collects facts, which are plain data; topics judge them and have no side effects. The examination runs in a
child of each process (:mod:`.supervisor`), so that the doctor survives an MPI library that hangs or kills its process.
"""
