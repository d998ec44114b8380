"""A torch.distributed process group on mpi4py: its operations on tensors, and adapters to the interfaces of torch."""
