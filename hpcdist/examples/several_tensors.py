"""Send several tensors at once in one structure. The receiver need not know their number, shapes or dtypes.

Rank 0 sends a task to every other rank without waiting, and receives the answers in any order.

mpirun -n 4 python -m hpcdist.examples.several_tensors
"""

from __future__ import annotations

from typing import Any

import torch

import hpcdist as hd


def main() -> None:
    """Send tasks, and receive answers. Collective over all ranks of the job."""
    with hd.init() as world:
        if world.rank > 0:
            task, source = hd.recv(with_source=True)  # any structure, from any rank
            hd.send(answer(task), dest=source)
            return

        tasks = {rank: task_of(rank, world.device) for rank in range(1, world.world_size)}
        # Send all at once, with one handle each. Do not change a task before its handle is done.
        sent = [hd.isend(task, dest=rank) for rank, task in tasks.items()]
        # Answers arrive in any order, so each comes with its source.
        coming = [hd.irecv(with_source=True) for _ in tasks]
        answers = {source: got for got, source in (handle.wait() for handle in coming)}
        for handle in sent:
            handle.wait()
        for rank in tasks:
            print(f"from rank {rank}:", {name: part.tolist() for name, part in answers[rank].items()})


def task_of(rank: int, device: torch.device) -> dict[str, Any]:
    """Return the task of rank `rank`; tensors on a GPU arrive on the receiver's GPU."""
    weights = {
        "matrix": torch.arange(3.0 * rank, device=device).view(rank, 3),
        "bias": torch.full((3,), 0.5, dtype=torch.bfloat16, device=device),
    }
    tokens = torch.arange(2 * rank, device=device)
    return {"name": f"task {rank}", "weights": weights, "tokens": tokens, "mask": tokens % 2 == 1, "ratio": 0.25}


def answer(task: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Do the work: return results of different shapes and dtypes."""
    weights = task["weights"]
    scaled = (weights["matrix"] + weights["bias"]) * task["ratio"]
    return {"words": task["tokens"][task["mask"]], "scaled": scaled, "sum": scaled.double().sum()}


if __name__ == "__main__":
    main()
