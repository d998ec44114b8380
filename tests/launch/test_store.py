"""torch's store on one node: a file without a name or a port, a new one for each world."""

import re

from launch import limit, mpirun

STORE = """
    import gc, os, tempfile, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import hpcdist as hd
    from hpcdist import activity
    from hpcdist.launch.rendezvous import LateStore

    def store():
        found = dist.distributed_c10d._get_default_store()
        while isinstance(found, dist.PrefixStore):
            found = found.underlying_store
        return found

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    world = hd.init()
    rank, last = world.rank, world.world_size - 1
    assert type(store()) is dist.FileStore
    if rank == last:
        time.sleep(0.2)
        store().set("key", "value")
    assert store().get("key") == b"value"
    try:
        store().wait(["missing"], timedelta(seconds=0.3))
        raise AssertionError("it has waited for nothing")
    except RuntimeError:
        pass
    child = os.fork()
    if not child:
        os.closerange(3, 1000)
        store().set(f"child {rank}", "yes")  # by its parent's descriptor
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for other in range(world.world_size):
        assert store().get(f"child {other}") == b"yes"
    kept = [store(), dist.new_group(backend="gloo")]
    x = torch.ones(2)
    dist.all_reduce(x, group=kept[1])
    assert x[0] == world.world_size
    world.finalize()

    # What is left of the first world's store writes to no file of the program that gets its descriptor.
    files = [tempfile.TemporaryFile() for _ in range(10)]
    before = descriptors()
    for turn in range(10):
        world = hd.init()
        assert type(store()) is dist.FileStore
        assert not store().check(["key"])
        store().set(f"turn {turn} {rank}", "")
        store().wait([f"turn {turn} {other}" for other in range(world.world_size)])
        for key in range(5 * turn):
            store().set(f"{'key' * turn} {key}", "value" * turn)
        dist.barrier()
        earlier = store()  # the name is taken again: the store of the world before ends in this one
        dist.barrier()
        world.finalize()
    assert descriptors() <= before + 2, (descriptors(), before)
    try:
        kept[0].set("late", "value")
        raise AssertionError("the first world's store is still open")
    except RuntimeError as error:
        assert "No such file" in str(error), error
    kept.clear()
    gc.collect()
    assert all(os.fstat(file.fileno()).st_size == 0 for file in files)
    os.write(1, b"done\\n")

    # Ranks that cannot open each other's files, as in containers with pids of their own.
    from hpcdist.activity import procstat
    def fails(*args):
        raise OSError("not allowed")
    if rank == 1:
        procstat.opened = fails
    world = hd.init(timeout=float(os.environ["LIMIT"]))
    x, late = torch.ones(2), store()
    dist.all_reduce(x, group=dist.new_group())
    if rank:
        assert type(late) is LateStore and "connected" not in vars(late), late
        assert dist.PrefixStore("a", late).add("n", 2) == 2 and late.delete_key("a/n") and late.num_keys() >= 0
        late = late.connected
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # by the store
    dist.all_reduce(x, group=dist.new_group(backend="gloo"))
    assert type(late) is dist.TCPStore and late.host == "127.0.0.1", late
    before = set(activity.peers)
    dist.destroy_process_group()
    dist.init_process_group("mpi")
    assert set(activity.peers) - before  # a group of the same name and ranks has another number
    dist.all_reduce(x, group=dist.new_group())
    os.write(1, f"sum {x[0]:g}\\n".encode())
    if rank == 0:
        hd.recv(source=1)
"""


def test_the_store_of_one_node_and_of_ranks_that_cannot_open_each_others_files():
    """These connect by the loopback interface: torch's store when it is first used, and the watching threads."""
    job = mpirun(2, code=STORE, env={"LIMIT": limit(3)["HPCDIST_TIMEOUT"]})
    assert job.out.count("done") == job.out.count("sum 8") == 2, job.err
    waits = r"^\[rank\d\]: {} +\S+ +\d+ +all_reduce\(\) at .* {} +\d+.\d s  waits$"
    assert re.search(waits.format(0, r"recv\(\) at .*"), job.err, re.MULTILINE), job.err
    assert re.search(waits.format(1, "the end of its program"), job.err, re.MULTILINE), job.err
