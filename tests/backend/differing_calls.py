"""A job whose ranks call differently: the test sets TORCH_DISTRIBUTED_DEBUG."""

import re

import torch
import torch.distributed as dist

import hpcdist

hpcdist.init()
rank, size = dist.get_rank(), dist.get_world_size()
odd = rank == 1


def refused(call, text):
    """On every rank: in this package's words, or in torch's own, which compares from 2.14 on."""
    try:
        call()
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    assert re.search(f"{text}|Detected mismatch between collectives", said), said


x = torch.ones(2 if odd else 1)
AT = r"at \S*differing_calls.py:\d+"
refused(
    lambda: dist.all_reduce(x),
    rf"rank 1: is in all_reduce\(\) of 2 x torch.float32, SUM {AT}, and rank 0 in all_reduce\(\) of 1 x .* {AT}",
)
refused(
    lambda: dist.gather(x, [torch.ones(1) for _ in range(size)] if rank == 0 else None),
    r"rank 0: expects 1 x torch.float32 from rank 1, which sends 2 x torch.float32",
)
splits = [2] + [1] * (size - 1) if odd else [1] * size
refused(
    lambda: dist.all_to_all_single(torch.ones(size), torch.ones(sum(splits)), [1] * size, splits),
    r"rank 0: expects 1 x torch.float32 from rank 1, which sends 2 x torch.float32",
)
y = torch.ones(1)
dist.all_reduce(y)  # and the job goes on
dist.barrier()
dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size))
dist.all_to_all_single(torch.empty(0), torch.ones(0))
outs = [torch.empty(1 + i) for i in range(size)]  # uneven, and right
dist.all_gather(outs, torch.full((1 + rank,), float(rank)))
assert y.item() == size
assert [out.tolist() for out in outs] == [[float(i)] * (1 + i) for i in range(size)]
print("survived")
