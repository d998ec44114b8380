"""torch.distributed.checkpoint: saved by some ranks with one sharding, loaded by others with another one."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import batches, check_close, mlp, shard_of, train


class _Part:
    """A group of some ranks and its mesh, made on all ranks."""

    def __init__(self, world, ranks):
        self.ranks, self.group = list(ranks), dist.new_group(list(ranks))
        self.member = world.rank in self.ranks
        self.index = self.ranks.index(world.rank) if self.member else -1
        if self.member:
            self.mesh = DeviceMesh.from_group(self.group, "cpu")


def _trained(world, part, model):
    """A sharded model, with an optimizer's state, after two steps."""
    fully_shard(model, mesh=part.mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = batches(2, 12 * len(part.ranks))
    train(model, optimizer, [shard_of(batch, part.index, len(part.ranks)) for batch in data])
    return optimizer


def test_training_goes_on_with_fewer_ranks(world, findings, folder):
    """Model and optimizer of fully_shard. async_save writes in a thread, while the ranks use the same group."""
    writer, reader = (_Part(world, range(size)) for size in (world.world_size, max(1, world.world_size - 1)))
    model = mlp()
    optimizer = _trained(world, writer, model)
    weights, moments = get_state_dict(model, optimizer)
    where = folder / "saved"
    saved = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=where, process_group=writer.group)
    total = torch.ones(3)
    for _ in range(20):
        dist.all_reduce(total)
        total /= world.world_size
    findings.same(total, torch.ones(3), "a call while the thread saves")
    saved.result()
    expected = [p.full_tensor().detach() for p in model.parameters()]
    world.comm.Barrier()
    if reader.member:
        other = mlp(seed=9)
        other_optimizer = _trained(world, reader, other)
        weights, moments = get_state_dict(other, other_optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=where, process_group=reader.group)
        set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
        check_close(findings, [p.full_tensor().detach() for p in other.parameters()], expected, "parameters", 0)
        # The next steps are those that one process would do.
        alone = mlp()
        alone_optimizer = torch.optim.Adam(alone.parameters(), 0.01)
        train(alone, alone_optimizer, batches(2, 12 * world.world_size))
        more = batches(2, 6 * len(reader.ranks))
        train(alone, alone_optimizer, more)
        train(other, other_optimizer, [shard_of(b, reader.index, len(reader.ranks)) for b in more])
        got = [p.full_tensor().detach() for p in other.parameters()]
        check_close(findings, got, [p.detach() for p in alone.parameters()], "after more steps", 1e-10)
    findings.checked += 1
