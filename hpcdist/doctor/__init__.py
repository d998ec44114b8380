"""Find what is wrong with a job and how to fix it: ``python -m hpcdist.doctor``, under mpirun, srun or alone.

Every rank collects facts, which are plain data (facts.py, examine.py). The checks are one table (table.py), which these
modules fill; each is a pure function of facts. The examination runs in a child of each process (supervisor.py), so that
the doctor survives an MPI library that hangs or kills its process.
"""

from hpcdist.doctor import checks_folders, checks_job, checks_network, checks_node

__all__ = ["checks_folders", "checks_job", "checks_network", "checks_node"]
