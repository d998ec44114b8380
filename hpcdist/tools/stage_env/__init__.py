"""Copy an environment from a shared file system to every node's own disk: it is read once, and sent over MPI."""
