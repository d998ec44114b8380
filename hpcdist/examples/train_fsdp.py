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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import SGD, Optimizer

import hpcdist as hd
from hpcdist import staging
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

__all__ = ["main"]

BATCH = 24  # samples of all ranks together: 1, 2, 3, 4, 6, 8, 12 or 24 ranks can share them


def main() -> None:
    """Train from the checkpoint if there is one, and write the weights. Collective over all ranks of the job."""
    asked = options()
    with hd.init() as world:
        if BATCH % world.world_size:
            raise ValueError(f"a batch of {BATCH} samples cannot be shared equally by {world.world_size} ranks")
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        model = network().to(world.device)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model)
        first = resume(model, optimizer, asked.checkpoint)
        if world.rank == 0:
            print(f"{world.world_size} ranks, from step {first}", flush=True)
        train(model, optimizer, first, asked, world)

        # Every rank writes its rows of each weight, at their place in the file.
        weights: dict[str, Any] = model.state_dict()
        staging.save(asked.weights, {name: x.to_local() for name, x in weights.items()}, dim=0)
        if world.rank == 0:
            compare(asked.weights, asked.steps)
            print(f"{asked.weights}: one process has learnt the same weights")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of the whole training (default 12)")
    parser.add_argument("--every", type=int, default=3, help="steps between two saves (default 3)")
    parser.add_argument("--die-after", type=int, default=0, help="kill the last rank after so many steps")
    parser.add_argument("--checkpoint", default="checkpoint.h5", help="(default checkpoint.h5)")
    parser.add_argument("--weights", default="weights.safetensors", help="(default weights.safetensors)")
    return parser.parse_args()


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


def resume(model: nn.Module, optimizer: Optimizer, path: str) -> int:
    """Load the checkpoint, which any number of ranks may have saved, and return the next step."""
    there = [os.path.exists(path)]
    dist.broadcast_object_list(there)  # rank 0's answer, for all
    if not there[0]:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=HDF5Reader(path))  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def state_of(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def train(model: nn.Module, optimizer: Optimizer, first: int, asked: argparse.Namespace, world: hd.World) -> None:
    """Train from step `first` on. Saves use a separate group, so they run beside the training's messages."""
    saves = dist.new_group()
    saving: Any = None
    for step in range(first, asked.steps):
        x, y = (hd.local(part, hd.Split(0)).to(world.device) for part in batch(step))
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # FSDP2 averages the gradients of all ranks
        optimizer.step()
        if (step + 1) % asked.every == 0:
            if saving is not None:
                saving.result()  # one save at a time; raises if it failed
            state, writer = state_of(model, optimizer, step + 1), HDF5Writer(asked.checkpoint)
            # Returns when the values have been copied. The next steps may change them.
            saving = dcp.async_save(state, storage_writer=writer, process_group=saves)  # type: ignore[attr-defined]
        if step + 1 == asked.die_after and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if saving is not None:
        saving.result()


def compare(path: str, steps: int) -> None:
    """Raise an AssertionError unless whole batches on this process alone give the weights in the file."""
    alone = network()
    optimizer = optimizer_of(alone)
    for x, y in map(batch, range(steps)):
        optimizer.zero_grad()
        loss = functional.mse_loss(alone(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = load_file(path)
    assert found.keys() == alone.state_dict().keys(), found.keys()
    for name, want in alone.state_dict().items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
