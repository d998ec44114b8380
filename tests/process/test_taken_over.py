"""What init() replaces in Python and torch comes back: the identity of each name, at each stage of a program."""

import pytest
from launch import mpirun

from hpcdist.runtime.registration import PLUGINS

NAMES = {  # as pkgutil.resolve_name() reads them: whether a world has its own meanwhile
    "sys:exit": True,
    "os:_exit": True,
    "sys:excepthook": True,
    "sys:unraisablehook": False,
    "sys:stdout": False,
    "sys:stderr": False,
    "threading:excepthook": False,
    "mpi4py.MPI:Init": False,
    "mpi4py.MPI:Init_thread": False,
    "torch.distributed:Work.is_completed": PLUGINS,
}
OTHERS = {"environment", "handlers", "handlers of C", "wakeup"}

PROGRAM = """
    import faulthandler, os, pkgutil, re, signal, sys, warnings
    import torch, torch.distributed
    from mpi4py import MPI

    def handler(*_): pass
    def state():
        found = {{name: pkgutil.resolve_name(name) for name in {names!r}}}
        found = {{name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}}
        found["environment"] = dict(os.environ)
        found["handlers"] = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        caught = int(re.search(r"SigCgt:\\s*(\\w+)", open("/proc/self/status").read())[1], 16)
        found["handlers of C"] = caught | 1 << signal.SIGUSR1 - 1  # which MPICH ignores by a handler of its own
        found["wakeup"] = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found["wakeup"], warn_on_full_buffer=False)
        return found
    def stage(name):
        now = state()
        changed = sorted(key for key in now if before[key] is not now[key] and before[key] != now[key])
        os.write(1, f"{{MPI.COMM_WORLD.rank}} {{name}}: {{', '.join(changed)}}\\n".encode())

    signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(pipe := os.pipe2(os.O_NONBLOCK)[1])
    before = state()
    import hpcdist as hd
    stage("imported")
    {body}
"""


def changes(body, np=2):
    """Return (stage, names that differ from those before the import) of all ranks, which must agree."""
    job = mpirun(np, code=PROGRAM.format(names=[*NAMES], body=body.strip().replace("\n", "\n    ")))
    lines = [line.split(" ", 1) for line in sorted(job.out.splitlines())]
    ranks = [[line for rank, line in lines if rank == str(number)] for number in range(np)]
    assert job.status == 0 and ranks[0] and ranks.count(ranks[0]) == np, job
    found = (line.split(": ", 1) for line in ranks[0])
    return {name: set(names.split(", ")) - {""} for name, names in found}


@pytest.mark.both
def test_finalize_puts_everything_back_and_so_does_a_failed_init():
    found = changes("""
for i in range(2):
    world = hd.init()
    assert not world.should_stop()
    stage(f"world {i}")
    hd.finalize()
    stage(f"finalized {i}")
try: hd.init(bind="x" if world.rank else None)
except hd.RankError: stage("failed")
hd.init().finalize()
stage("finalized at last")
""")
    own = {name for name, replaced in NAMES.items() if replaced} | OTHERS
    assert found.pop("world 0") == found.pop("world 1") == own
    assert len(found) == 5 and not any(found.values()), found


def test_what_the_program_replaces_meanwhile_is_left_and_said():
    found = changes("""
world = hd.init()
ours, calls = sys.excepthook, []
def theirs(*error): calls.append(ours(*error))
sys.excepthook = theirs
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    hd.finalize()
    hd.finalize()
texts = [str(w.message) for w in said]
assert sys.excepthook is theirs and sum("excepthook" in text for text in texts) == 1
stage("finalized")
hd.init()
sys.excepthook(ValueError, ValueError("shown, and the program goes on"), None)
hd.finalize()
assert len(calls) == 1 and sys.excepthook is theirs
""")
    assert found["finalized"] == {"sys:excepthook"}


def test_after_an_error_of_one_rank_alone_in_init_the_others_do_not_wait():
    code = """
    import hpcdist as hd
    from hpcdist.runtime import world
    from mpi4py import MPI
    def fail(*_): raise OSError("on this rank alone")
    if MPI.COMM_WORLD.rank == 1: world._settings = fail
    hd.init()
    """
    job = mpirun(2, code=code)
    assert job.status == 1 and "OSError: on this rank alone" in job.err, job
