"""Several hosts, for real: who is where, addresses that mislead, every verb and route, and what is put on the wires.

python -m pytest -m cluster tests/cluster/test_hosts.py     # as root; under the MPI of that Python
"""

import json
import sys
import textwrap
from pathlib import Path

import pytest
from launch import slowness

pytestmark = pytest.mark.cluster

HERE = Path(__file__).resolve().parent
RANKS = [2, 1, 1]  # on each host
MIB = 8  # a rank, of what is put on the wires
PART = MIB << 20
ROUTES = ("mpi", "gloo")  # hdf5 goes through the file system, which here is no other host's
SLACK = 0.01  # parts of a rank: what the ranks agree on beforehand
PORTS = range(20000, 20200)  # none that the system gives out by itself

# Rank 0's host gives out these ports from here on; MPI has all its connections already.
NARROW = f"""
    import os, time
    from pathlib import Path
    from mpi4py import MPI
    import torch
    import torch.distributed as dist
    import hpcdist as hd
    comm = MPI.COMM_WORLD
    comm.alltoall([0] * comm.size)
    if comm.rank == 0:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("{PORTS[0]} {PORTS[-1]}")
    comm.Barrier()
    start = time.monotonic()
    def say(text): os.write(1, (text + "\\n").encode())  # one write a line: the ranks' lines do not mix
"""


def test_an_address_that_every_host_has_is_not_taken_for_rank_0s(hosts):
    """docker0 has it. On node2 something else listens there, at whatever port rank 0 is given on node1."""
    others = f"""
        import select, socket
        servers = [socket.create_server(("172.17.0.1", port)) for port in range({PORTS[0]}, {PORTS[-1] + 1})]
        print("listening", flush=True)
        callers = []
        while True:
            for server in select.select(servers, [], [])[0]:
                callers.append(server.accept()[0])
                callers[-1].sendall(b"220 a mail server, or what else says something first")
    """
    stranger = hosts.start("node2", [sys.executable, "-c", textwrap.dedent(others)])
    assert stranger.process.stdout.readline() == "listening\n"
    told = """
    world = hd.init()
    x = torch.ones(1)
    dist.all_reduce(x)
    say(f"{x.item():.0f} {hd.concat(torch.arange(world.rank + 1), route='gloo').tolist()}")
    """
    job = hosts.mpirun([1, 1], code=NARROW + told)
    assert (job.status, job.out) == (0, "2 [0, 0, 1]\n" * 2), job.err


def test_worlds_of_one_host_and_of_all_in_turn(hosts):
    """Each has gloo's interface of its own, also in the groups that the user makes, and leaves nothing to the next.
    With DETAIL torch makes a group of gloo beside each of another backend. A staging folder of one host is refused on
    all ranks, and the job goes on. (On a folder that they share: see test_rank_tests_hosts.py.)"""
    job = hosts.mpirun(
        [2, 1],
        code="""
    import os
    from mpi4py import MPI
    import torch
    import torch.distributed as dist
    import hpcdist as hd
    before = dict(os.environ)
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    for comm in (local, None, local, None):
        with hd.init(comm) as world:
            place = [(0, 0, 2), (0, 1, 2), (1, 0, 2)][MPI.COMM_WORLD.rank] if comm is None else (0, local.rank, 1)
            assert (world.node, world.local_rank, world.nodes) == place, place
            x = torch.ones(1)
            dist.all_reduce(x, group=dist.new_group(backend="gloo"))
            assert x.item() == world.world_size == hd.concat(x, route="gloo").numel()
            assert before.items() <= os.environ.items() and "GLOO_SOCKET_IFNAME" not in os.environ
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(world.rank), str(world.world_size))
        assert dict(os.environ) == before
    hd.init()
    dist.destroy_process_group()
    dist.init_process_group("mpi")
    dist.all_reduce(x, group=dist.new_group(backend="gloo"))
    assert x.item() == 9 and before.items() <= os.environ.items() and "GLOO_SOCKET_IFNAME" not in os.environ
    dist.destroy_process_group()
    hd.finalize()
    world = hd.init(staging="/tmp")
    large = torch.ones(1 << 18)  # small tensors travel in the structure's own message
    refused = []
    for x in (large, {"x": large}):
        for verb in (hd.gather, hd.concat):
            try: verb(x, route="hdf5")
            except hd.RankError as error: refused.append((sorted(error.problems), str(error)))
    assert len(refused) == 4, refused
    for ranks, text in refused:
        assert ranks == [2] and "not seen by this rank: the folder is not shared by all nodes" in text, refused
    assert hd.concat(torch.ones(1), route="mpi").tolist() == [1, 1, 1]
    world.comm.Barrier()
    if world.rank == 0: print("right")
    """,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert (job.status, job.out) == (0, "right\n"), job.err


def test_nodes_that_cannot_reach_rank_0_are_told_so_within_seconds(hosts):
    """MPI talks, and node3 reaches none of the ports that are given out from then on, as behind a firewall."""
    rule = f"ip rule add ipproto tcp dport {PORTS[0]}-{PORTS[-1]} unreachable"
    assert hosts.run("node3", rule.split()).status == 0
    told = """
    try:
        hd.init()
    except hd.LaunchError as error:
        say(f"{time.monotonic() - start:.1f} s: {error}")
    """
    job = hosts.mpirun([1, 1, 1], code=NARROW + told)
    assert job.status == 0, job.err
    lines = job.out.splitlines()
    assert len(lines) == 3, job
    for line in lines:
        assert "no address of rank 0's host is reached by all 3 ranks" in line and hosts.address("node1") in line
        assert float(line.split()[0]) < 10 * slowness(), line


def least(ranks):
    """What must come into each host, in parts of one rank, for each verb of wire.py: what its ranks need in all, and
    none of them has."""
    size = sum(ranks)
    nothing = [0.0] * len(ranks)
    whole = [float(size - count) for count in ranks]  # the parts of all other ranks, once a host
    return {
        "gather": [whole[0], *nothing[1:]],
        "split": [0.0, *map(float, ranks[1:])],
        "concat": whole,
        "concat of a structure": whole,
        "concat shared": whole,
        "rows to columns": [count * (size - count) / size for count in ranks],
        "rows within the nodes": nothing,
        "copies to rows": nothing,
        "send": [*nothing[1:], 1.0],
        "send within a node": nothing,
    }


@pytest.mark.parametrize("ranks", [RANKS, [2, 2]], ids=str)
def test_what_each_verb_puts_on_the_wires(ranks, hosts):
    """What must come into a host, and 2% of headers: by MPI once, since the ranks of a host share what comes. Where all
    ranks get the same by gloo, each gets its own copy."""
    before = hosts.bytes()
    job = hosts.mpirun(ranks, HERE / "wire.py", str(MIB), "4", ",".join(ROUTES))
    after = hosts.bytes()
    assert job.status == 0, job.err
    measured = json.loads(job.out)  # bytes received and sent by each host
    bounds_of = least(ranks)
    only_mpi = ("send", "concat shared")
    expected = {f"{verb} {route}" for verb in bounds_of for route in ROUTES}
    assert set(measured) == {name for name in expected if name.endswith("mpi") or not name.startswith(only_mpi)}
    for name, found in measured.items():
        bounds = bounds_of[name.rpartition(" ")[0]]
        parts = [count / PART for count in found["received"]]
        print(f"{name:28} {' '.join(f'{b:.3f}' for b in bounds):18} {' '.join(f'{p:.3f}' for p in parts)}")
        for bound, part, sent, count in zip(bounds, parts, found["sent"], ranks, strict=True):
            copies = count if name.startswith("concat") and name.endswith("gloo") else 1
            most = 1.02 * bound * copies + SLACK + 0.005 * sent / PART  # what is sent is acknowledged
            assert 0.999 * bound <= part <= most, (name, bounds, parts)
    for host in hosts.names[: len(ranks)]:  # from outside: the job counted what there was
        assert after[host].received - before[host].received > sum(
            found["received"][hosts.names.index(host)] for found in measured.values()
        )
