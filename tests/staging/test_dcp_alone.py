"""Checkpoints without MPI: in processes that torch starts itself, over gloo, on the ShardedTensors of torch's tests."""

import textwrap

import pytest
import torch
from launch import python, run
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hpcdist.staging.dcp import plan_file

PROGRAM = """
    import itertools, sys, warnings
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
    from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

    def shards(*parts):
        return EnumerableShardingSpec([ShardMetadata(list(o), list(s), placement=f"rank:{r}/cpu") for o, s, r in parts])

    SPECS = [
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"]),
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
        shards(((0, 0), (2, 20), 0), ((2, 0), (1, 20), 1), ((3, 0), (3, 20), 0), ((6, 0), (4, 20), 1)),
        shards(((0, 0), (10, 7), 1), ((0, 7), (4, 13), 1), ((4, 7), (6, 13), 0)),
    ]
    WHOLE = torch.arange(200.0).view(10, 20)

    def tensor(spec, filled):
        made = sharded_tensor.zeros(spec, 10, 20, init_rrefs=False)
        for shard in made.local_shards() if filled else ():
            at = [slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)]
            shard.tensor.copy_(WHOLE[tuple(at)])
        return made

    def run(rank, folder):
        warnings.simplefilter("ignore")
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for k, (first, second) in enumerate(itertools.pairwise(SPECS[i] for i in (0, 1, 2, 3, 4, 0, 2, 4, 1, 3, 0))):
            path = f"{folder}/{k % 2}.h5"
            dcp.save({"x": tensor(first, True), "k": k}, storage_writer=HDF5Writer(path, window=300))
            state = {"x": tensor(second, False), "k": -1}
            dcp.load(state, storage_reader=HDF5Reader(path, verify=True))
            expected = tensor(second, True).local_shards()
            same = [torch.equal(a.tensor, b.tensor) for a, b in zip(state["x"].local_shards(), expected, strict=True)]
            assert all(same) and same and state["k"] == k, (k, same, state["k"])
            dist.barrier()
        by_process = {"async_checkpointer_type": dcp.state_dict_saver.AsyncCheckpointerType.PROCESS}
        dcp.async_save({"x": WHOLE}, storage_writer=HDF5Writer(f"{folder}/a.h5"), **by_process).result()
        for k, name in enumerate("aaba"):  # the last ones before the first has ended
            dcp.async_save({"x": WHOLE + k}, storage_writer=HDF5Writer(f"{folder}/{name}.h5"), **by_process)
        for k, name in (3, "a"), (2, "b"):
            state = {"x": torch.zeros(10, 20)}
            dcp.load(state, storage_reader=HDF5Reader(f"{folder}/{name}.h5"))  # waits for them
            assert torch.equal(state["x"], WHOLE + k)
        assert "mpi4py.MPI" not in sys.modules
        dist.barrier()
        dist.destroy_process_group()
        print("done", flush=True)

    if __name__ == "__main__":
        mp.start_processes(run, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_sharded_tensors_of_any_plan_without_mpi(tmp_path):
    """Shards of each plan are saved, and load into those of others; also from the process that async_save starts."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = run([*python(), str(program), str(tmp_path)])
    assert (done.status, done.out.count("done")) == (0, 2), done.out + done.err[-3000:]
    left = {path.name for path in tmp_path.iterdir()} - {"program.py", "store"}  # torch may delete the store
    assert left == {"0.h5", "1.h5", "a.h5", "b.h5"}


@pytest.mark.parametrize("chunks", [[((0, 0), (2, 4))], [((0, 0), (3, 4)), ((1, 0), (2, 4))]])
def test_shards_must_be_the_tensor_once(chunks):
    """Not a part of it, nor as many elements with two rows twice: torch's planner sees to it, but a caller may have
    another one."""
    size, properties, plans = torch.Size((5, 4)), TensorProperties(dtype=torch.float32), []
    for offset, shape in chunks:
        data = TensorWriteData(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)), properties, size)
        plans.append(SavePlan([WriteItem(MetadataIndex("x", offset), WriteItemType.SHARD, tensor_data=data)]))
    with pytest.raises(ValueError, match=r"'x': the shards of the ranks are not the tensor of shape"):
        plan_file(plans, 32)
