"""What a job opens to others: no pickle that was not asked for, no socket beyond this node, files for its user only."""

import ast
import os
import stat
from pathlib import Path

from launch import commands

import hpcdist
from hpcdist.formats.paths import private_folder

ROOT = Path(hpcdist.__file__).parent
# What mpi4py sends as pickles: its methods that begin with a small letter.
PICKLED = {
    *("allgather", "allreduce", "alltoall", "bcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send"),
}
COMMS = ["comm", "local", "node", "leaders", "header_comm", "data_comm", "side_comm", "private"]
PLAIN = {  # what this package itself has to say to the job's other ranks; headers of structures are bytes in it
    *("control/objects.py", "collectives/split.py", "collectives/structures.py", "staging/writer.py"),
    *("collectives/redistribute.py", "comm/node_memory.py", "watch/watcher.py"),
    *("collectives/all_to_all.py", "collectives/metrics.py"),
}


def test_who_calls_the_methods_of_mpi4py_that_pickle():
    """Besides the examples and the ways by hand of compare, which are users."""
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PICKLED:
                owner = ast.unparse(node.func.value)
                if owner.rpartition(".")[2].strip("_") in COMMS:
                    found.append(str(path.relative_to(ROOT)))
    assert {place for place in found if not place.startswith(("examples", "tools/compare"))} == PLAIN


# What of pickle is used where: structures on demand (pickle=True); DCP's .metadata, which is read with torch's metadata
# classes alone: see tests/commands/test_convert.py.
PICKLES = {
    "objects.py": {"dumps", "loads"},  # values between the ranks of a job
    "datagrams.py": {"dumps", "loads"},  # the same, with a keyed digest that is compared first
    "tree.py": {"HIGHEST_PROTOCOL", "dumps", "loads"},
    "torch_files.py": {"Unpickler"},
    "horovod.py": {"dumps", "loads"},  # Horovod's functions of objects
}


def test_who_knows_pickle_and_that_torch_loads_weights_only():
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"dill", "cloudpickle", "marshal", "shelve"}, path
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_pickle(node.value)}
        assert used <= PICKLES.get(path.name, set()), path
        assert "pickle" not in names or path.name in PICKLES, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":  # the class of an exception, no reader
                assert [alias.name for alias in node.names] == ["UnpicklingError"], path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True" or given.get("allow_pickle", "False") == "False", path


def _is_pickle(node):
    return isinstance(node, ast.Name) and node.id == "pickle"


SOCKETS = """
    import os
    import torch
    from mpi4py import MPI  # whose own sockets are there from here on
    def listening():
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            try: mine.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError: pass
        found = set()
        for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
            for line in open(f"/proc/net/{table}").readlines()[1:]:
                words = line.split()
                if words[3] == state and f"socket:[{words[9]}]" in mine:
                    found.add((table, words[1]))
        return found
    before = listening()
    import hpcdist as hd
    world = hd.init()
    os.write(1, f"init() opened {len(listening() - before)}\\n".encode())
    x = torch.ones(world.rank + 1)
    for route in ("mpi", "gloo", "hdf5"):
        hd.concat(x, route=route)
        hd.concat(x, route=route, async_op=True).wait()
    hd.gather({"x": x})
    sent = hd.isend(x, 1 - world.rank); hd.recv(1 - world.rank); sent.wait()
    for table, address in listening() - before:
        loopback = address.split(":")[0] in ("0100007F", "00000000000000000000000001000000")
        os.write(1, f"{'ok' if loopback else 'OPEN'} {table} {address}\\n".encode())
    os.write(1, b"done\\n")
"""


# Of other backends, and of those that torch makes beside each with DETAIL.
DETAIL = """
    import torch.distributed as dist
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    for start in (hd.init, lambda: hd.init(backend="gloo")):
        hd.finalize()
        MPI.COMM_WORLD.Barrier()
        before = listening()
        start()
        hd.concat(torch.ones(9), route="gloo")
        dist.all_reduce(torch.ones(9), group=dist.new_group(backend="gloo"))
        dist.barrier()
        found = {address.split(":")[0] for _, address in listening() - before}
        os.write(1, f"found {found}\\n".encode())
        dist.barrier()
    hd.finalize()
    dist.set_debug_level(dist.DebugLevel.OFF)
"""
STAGING = """
    import os, stat, torch, hpcdist as hd
    from hpcdist.routes import hdf5_files
    world = hd.init()
    seen = []
    check = hdf5_files.check_visible
    def look(place):
        folder = os.path.dirname(os.path.realpath(place.path))
        seen.append([stat.S_IMODE(os.stat(path).st_mode) for path in (place.path, folder)])
        check(place)
    hdf5_files.check_visible = look
    os.umask(0)
    hd.concat(torch.ones(3), route="hdf5")
    print(world.staging, *map(oct, seen[0])) if world.rank == 0 else None
"""


def test_no_socket_of_ours_listens_beyond_this_node_and_route_hdf5_has_a_folder_of_the_users(tmp_path):
    sockets, staging = commands(2, ["-c", SOCKETS + DETAIL], ["-c", STAGING], env={"TMPDIR": str(tmp_path)})
    assert sockets.out.count("done") == sockets.out.count("init() opened 0\n") == 2, sockets
    assert "ok tcp" in sockets.out  # gloo's
    assert sockets.out.count("found {'0100007F'}\n") == 4, sockets.out
    assert "OPEN" not in sockets.out, sockets.out
    assert staging.out.split() == [str(tmp_path / f"hpcdist-{os.getuid()}"), "0o600", "0o700"]


def test_a_folder_that_somebody_else_has_prepared_is_not_used(tmp_path):
    mine = tmp_path / f"hpcdist-{os.getuid()}"
    assert private_folder(str(tmp_path)) == str(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    assert private_folder(str(tmp_path)) == str(mine)  # again
    mine.chmod(0o777)
    assert private_folder(str(tmp_path)) == str(tmp_path)
    mine.rmdir()
    mine.symlink_to("/etc")
    assert private_folder(str(tmp_path)) == str(tmp_path)
    assert private_folder(str(tmp_path / "missing")) == str(tmp_path / "missing")
