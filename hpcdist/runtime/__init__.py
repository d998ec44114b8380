"""Turn an MPI job into a torch.distributed job, and run calls in the background."""
