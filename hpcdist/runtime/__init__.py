"""From an MPI job to torch.distributed, and what goes on in the background."""
