"""What is wrong with this job, and what to do about it: ``python -m hpcdist.doctor``, under mpirun, srun or alone.

Facts are gathered on every rank, as plain data; judges make findings of them, and touch nothing. The examination runs
in a child of each process (:mod:`.ward`), so that the doctor outlives an MPI library that hangs or kills its process.
"""
