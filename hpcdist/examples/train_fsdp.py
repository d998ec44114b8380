"""Train a model with FSDP2, save in the background, resume on another number of ranks after a kill, and export the
weights.

Parameters, gradients and the optimizer's state are sharded over all ranks. The checkpoint is one HDF5 file, written in
the background of the training. Its name always has the last complete save. The weights are exported to a .safetensors
file, and no rank holds all of them. One process with the whole batches learns the same weights, up to rounding.

mpirun -n 3 python -m hpcdist.examples.train_fsdp --die-after 7     # a rank dies
mpirun -n 2 python -m hpcdist.examples.train_fsdp                   # resumes from the checkpoint
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import SGD, Optimizer

import hpcdist as hd
from hpcdist import staging
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

STEPS, SAVE_EVERY = 12, 3
BATCH = 24  # samples of all ranks together
CHECKPOINT, WEIGHTS = "checkpoint.h5", "weights.safetensors"


def main() -> None:
    """Train from the checkpoint if there is one, and write the weights. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.train_fsdp")
    parser.add_argument("--die-after", type=int, default=0, help="kill the last rank after so many steps")
    die_after = parser.parse_args().die_after
    with hd.init() as world:
        model = network().to(world.device)
        for module in (*model, model):
            fully_shard(module)
        optimizer = optimizer_of(model)
        first = resume(model, optimizer)
        if world.rank == 0:
            print(f"{world.world_size} ranks, from step {first}", flush=True)
        train(model, optimizer, first, die_after, world)

        # Every rank writes its rows of each weight, at their place in the file.
        weights: dict[str, Any] = model.state_dict()
        staging.save(WEIGHTS, {name: x.to_local() for name, x in weights.items()}, dim=0)
        if world.rank == 0:
            compare()
            print(f"{WEIGHTS}: one process has learnt the same weights")


def network() -> nn.Sequential:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 5))


def optimizer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step: points, and a smooth function of them."""
    x = torch.rand(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return x, (3 * x).sin().mean(1, keepdim=True).expand(-1, 5)


def learn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, ranks: int = 1) -> None:
    """Take a step with this rank's share of a batch. FSDP2 averages the gradients of all ranks: the sum of the loss
    over the share, times the number of ranks, is right also if the shares differ."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(x), y, reduction="sum") * ranks / BATCH
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def resume(model: nn.Module, optimizer: Optimizer) -> int:
    """Load the checkpoint, which any number of ranks may have saved, and return the next step."""
    there = [os.path.exists(CHECKPOINT)]
    dist.broadcast_object_list(there)  # rank 0's answer, for all
    if not there[0]:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=HDF5Reader(CHECKPOINT))  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def state_of(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def train(model: nn.Module, optimizer: Optimizer, first: int, die_after: int, world: hd.World) -> None:
    """Train from step `first` on. Saves use a separate group, so they run beside the training's messages."""
    saves = dist.new_group()
    saving: Any = None
    for step in range(first, STEPS):
        x, y = (hd.local(part, hd.Split(0)).to(world.device) for part in batch(step))
        learn(model, optimizer, x, y, world.world_size)
        if (step + 1) % SAVE_EVERY == 0:
            if saving is not None:
                saving.result()  # one save at a time; raises if it failed
            state, writer = state_of(model, optimizer, step + 1), HDF5Writer(CHECKPOINT)
            # Returns when the values have been copied. The next steps may change them.
            saving = dcp.async_save(state, storage_writer=writer, process_group=saves)  # type: ignore[attr-defined]
        if step + 1 == die_after and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if saving is not None:
        saving.result()


def compare() -> None:
    """Raise an AssertionError unless whole batches on this process alone give the weights in the file."""
    alone = network()
    optimizer = optimizer_of(alone)
    for x, y in map(batch, range(STEPS)):
        learn(alone, optimizer, x, y)
    torch.testing.assert_close(load_file(WEIGHTS), {**alone.state_dict()}, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
