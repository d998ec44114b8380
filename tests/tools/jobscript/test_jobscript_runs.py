"""Job scripts for PBS, Flux and LSF run: with the real mpirun of this environment, and stand-ins for what is not here.

A stand-in has the options of the real command, refuses any other, and sets the variables that the real one sets
(docs/do/launchers.md has what was run with the real one). Slurm's scripts run on Slurm: tests/cluster.
"""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from launch import launcher, run

from hpcdist.launch.launcher import nearest, on_node
from hpcdist.tools.jobscript import Shape, write

# What each rank finds.
WHO = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
here = {
    "rank": world.rank, "size": world.size, "arguments": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)),
    "environ": {name: value for name, value in os.environ.items() if "_MCA_" not in name and "BASH" not in name},
}
lines = world.gather(json.dumps(here))
if lines:
    print("\\n".join(lines), flush=True)
"""

# Starts the ranks by mpirun. Each sets the variables of the launcher that is stood in for in place of mpirun's own, and
# becomes the program.
AS = """
import os, subprocess, sys
def start(mpirun, ranks, per_node, names, program):
    code = (
        "import os, sys\\n"
        "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\\n"
        "for name in list(os.environ):\\n"
        "    if name.startswith(('OMPI_COMM_', 'MPI_LOCAL')): del os.environ[name]\\n"
        f"values = {ranks}, rank, rank % {per_node}, {per_node}\\n"
        f"os.environ.update({{name: str(value) for name, value in zip({names!r}, values) if name}})\\n"
        "os.execvp(sys.argv[1], sys.argv[1:])\\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PBS_", "LSB_"))}
    done = subprocess.run([*mpirun, str(ranks), sys.executable, "-SEc", code, *program], env=environ)
    sys.exit(done.returncode)
"""
FLUX = """
import argparse
p = argparse.ArgumentParser()
for name in ("--nodes", "--ntasks", "--cores-per-task", "--gpus-per-task"):
    p.add_argument(name, type=int, default=1)
p.add_argument("-o", choices=["cpu-affinity=per-task", "cpu-affinity=off"])
p.add_argument("program", nargs=argparse.REMAINDER)
if sys.argv[1] == "getattr":
    print({"size": NODES, "hostlist": "n[1-2]"}[sys.argv[2]])
else:
    assert sys.argv[1] == "run"
    a = p.parse_args(sys.argv[2:])
    assert a.nodes == NODES
    names = ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", None)
    start(MPIRUN, a.ntasks, a.ntasks // a.nodes, names, a.program)
"""
JSRUN = """
import argparse
p = argparse.ArgumentParser()
for name in "nracg":
    p.add_argument(f"-{name}", type=int, required=True)
p.add_argument("-d", choices=["packed"])
p.add_argument("-b")
p.add_argument("program", nargs=argparse.REMAINDER)
a = p.parse_args()
assert (a.n, a.r) == (NODES, 1)
names = [f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
start(MPIRUN, a.n * a.a, a.a, names, a.program)
"""
PALS = """
import argparse
p = argparse.ArgumentParser()
for name in ("-n", "--ppn", "--depth"):
    p.add_argument(name, type=int, required=True)
p.add_argument("--cpu-bind", choices=["depth", "none"])
p.add_argument("program", nargs=argparse.REMAINDER)
a = p.parse_args()
assert a.n == NODES * a.ppn
names = ("PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
start(MPIRUN, a.n, a.ppn, names, a.program)
"""
APPTAINER = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("exec", choices=["exec"])
p.add_argument("--nv", action="store_true")
p.add_argument("--bind", action="append")
p.add_argument("image")
p.add_argument("program", nargs=argparse.REMAINDER)
a = p.parse_args()
os.environ["APPTAINER_CONTAINER"] = f"{a.image} {a.nv} {a.bind}"
os.execvp(a.program[0], a.program)
"""
# GPU i is PCI device i of this machine, in the words of nvidia-smi.
SMI = """
gpu, query, form = sys.argv[1:]
assert (query, form) == ("--query-gpu=pci.bus_id", "--format=csv,noheader")
number = int(gpu.removeprefix("--id="))
print("0000" + sorted(os.listdir("/sys/bus/pci/devices"))[number].upper())
"""


@pytest.fixture
def bin_(tmp_path):
    """A folder of commands before those of the system: this Python and its mpirun."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "who.py").write_text(WHO)
    for name, target in (("python", sys.executable), ("mpirun", launcher(1)[0])):
        (folder / name).write_text(f'#!/bin/sh\nexec "{target}" "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def stand_in(bin_, name, code, nodes=1):
    mpirun = launcher(1)[:-1]
    first = f"#!/bin/sh\n'''exec' '{sys.executable}' -SE \"$0\" \"$@\"\n' '''"  # whose path may have a blank
    (bin_ / name).write_text(f"{first}\n{AS}\nMPIRUN, NODES = {mpirun!r}, {nodes}\n{code}")
    (bin_ / name).chmod(0o755)


def start(bin_, shape, *args, under=(), **environ):
    script = bin_.parent / "job"
    script.write_text(write(shape))
    path = f"{bin_}:{os.environ['PATH']}"
    yields = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    job = run([*under, "bash", str(script), *args], bin_.parent, {"PATH": path, **yields, **environ})
    assert job.status == 0, f"{job.out}\n{job.err}"
    return job


def ranks(job):
    found = [json.loads(line) for line in job.out.splitlines() if line.startswith("{")]
    assert [one["rank"] for one in found] == list(range(len(found)))
    assert {one["size"] for one in found} == {len(found)}
    return found


HOST = socket.gethostname()
# Of a script: its shape, the stand-in, words after the script, its environment, each rank's words, by whom a rank was
# launched, its number on its node and how many there are, and what is printed.
RUNS = {
    "pbs, mpirun": (  # which reads the hosts from PBS_NODEFILE, with one line for each rank
        {"scheduler": "pbs", "nodes": 1, "ntasks_per_node": 2, "cpus_per_task": 3, "command": ("../who.py", "a b")},
        None,
        (),
        {"PBS_JOBID": "7.server", "PBS_NODEFILE": f"{HOST}\n" * 2},
        ["a b"],
        None,
        [f"cpu: job 7.server on 1 nodes: {HOST}\n", "ranks: 2, 2 on each node, 3 CPUs each\n"],
    ),
    "pbs, array of pals": (
        {"kind": "array", "scheduler": "pbs", "launcher": "pals", "command": ("../who.py", "of-%a")},
        ("mpiexec", PALS),
        (),
        {"PBS_ARRAY_ID": "8[]", "PBS_ARRAY_INDEX": "5", "PBS_NODEFILE": "n1\nn1\nn2\nn2\n"},
        ["of-5"],
        ("mpiexec of PALS", 0, 1),
        ["array: job 8[], index 5 on 2 nodes: n1,n2\n"],
    ),
    "flux": (
        {"scheduler": "flux", "bind": "cores", "command": ("who.py", "one")},
        ("flux", FLUX),
        ("two words",),
        {"FLUX_ENCLOSING_ID": "f1"},
        ["one", "two words"],
        ("flux run", 0, None),
        ["cpu: job f1 on 2 nodes: n[1-2]\n"],
    ),
    "flux, plain": ({"scheduler": "flux", "plain": True}, ("flux", FLUX), (), {}, [], ("flux run", 0, None), []),
    "lsf, jsrun": (  # LSB_MCPU_HOSTS begins with the node that the script runs on
        {"scheduler": "lsf"},
        ("jsrun", JSRUN),
        (),
        {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"},
        [],
        ("jsrun", 0, 1),
        ["ranks: 2, 1 on each node, 1 CPUs each\n"],
    ),
    "lsf, array of mpirun": (
        {"kind": "array", "scheduler": "lsf", "launcher": "mpirun", "array": "1-4", "nodes": 1, "ntasks_per_node": 2,
         "command": ("who.py", "%a")},
        None,
        (),
        {"LSB_JOBID": "9", "LSB_JOBINDEX": "3", "LSB_MCPU_HOSTS": f"{HOST} 2"},
        ["3"],
        None,
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_two_ranks_run(case, bin_):
    made, other, words, environ, arguments, launched, texts = RUNS[case]
    if other:
        stand_in(bin_, *other, 2)
    if "PBS_NODEFILE" in environ:
        nodes, work = bin_.parent / "nodes", bin_.parent / "work"
        nodes.write_text(environ["PBS_NODEFILE"])
        work.mkdir()
        environ = {**environ, "PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": str(work)}
    program = ("python", *made.get("command", ("who.py",)))
    job = start(bin_, Shape(**{"ntasks_per_node": 1, **made, "command": program}), *words, **environ)
    found = ranks(job)
    assert [one["arguments"] for one in found] == [arguments] * 2
    assert {one["environ"]["OMP_NUM_THREADS"] for one in found} == {str(made.get("cpus_per_task", 1))}
    for one in found if launched else ():
        assert (nearest(one["environ"])[0].name, *on_node(one["environ"])) == launched
    assert all(text in job.out for text in texts), job.out


def test_ranks_in_a_container_on_the_cores_beside_their_gpus(bin_):
    """The script itself may use one core; a rank may use those beside its device, all of this machine's or some."""
    stand_in(bin_, "flux", FLUX)
    stand_in(bin_, "apptainer", APPTAINER)
    stand_in(bin_, "nvidia-smi", SMI)
    shape = Shape(
        kind="train", scheduler="flux", nodes=1, gpus_per_node="2", cpus_per_task=1, apptainer="my image.sif",
        mounts=("/scratch", "/data:/in"), command=("python", "who.py"),
    )  # fmt: skip
    job = start(bin_, shape, under=("taskset", "--cpu-list", "0"), CUDA_VISIBLE_DEVICES="1,0")
    found = ranks(job)
    inside = f"my image.sif True {[str(bin_.parent), '/scratch', '/data:/in']}"
    devices = sorted(Path("/sys/bus/pci/devices").iterdir())
    for one, gpu in zip(found, (1, 0), strict=True):
        assert one["environ"]["APPTAINER_CONTAINER"] == inside
        assert one["environ"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert one["cores"] == _numbers((devices[gpu] / "local_cpulist").read_text().strip())
    assert "not bound" not in job.err


def test_ranks_that_cannot_be_bound_say_so_and_run(bin_):
    stand_in(bin_, "flux", FLUX)
    stand_in(bin_, "nvidia-smi", "print('No devices were found'); sys.exit(6)")
    shape = Shape(kind="train", scheduler="flux", nodes=1, gpus_per_node="1", command=("python", "who.py"))
    job = start(bin_, shape, CUDA_VISIBLE_DEVICES="")
    assert len(ranks(job)) == 1
    assert "local rank 0 is not bound to the cores beside GPU 0" in job.err


# Commands that write their words, a JSON list a line, to standard output.
SAYS = "import json\nprint(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), flush=True)\n"
CONDA = f"if sys.argv[1:] == ['info', '--base']: print(os.environ['PWD']); sys.exit()\n{SAYS}"
# What a shell reads in its own way. Mounts with those of QUOTED are refused.
TYPED = ("a;id>x", "a&b", "a(b)", "#x", "a*", "~", "!x", "{a..c}", "a|b", "<x", "^", "[x]", "%a", "\u00e9")
QUOTED = ("a b", "$(id)", "`id`", "$HOME", "'", '"', "\\", "a\tb", "", "--")
NAME = " ".join([*TYPED, *QUOTED])


@pytest.mark.parametrize("plain", [False, True])
def test_each_word_arrives_as_it_was_typed(bin_, plain):
    """Mounts, images, environments, modules, the program's words and those after the script."""
    folder = bin_.parent
    for name, code in (("srun", SAYS), ("module", SAYS), ("conda", CONDA), ("apptainer", "print('MPICH')")):
        stand_in(bin_, name, code)
    (bin_ / "python").write_text("#!/bin/sh\necho MPICH\n")  # as mpi4py calls the library
    for file in ("etc/profile.d/conda.sh", f"{NAME}/bin/activate"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("echo '[\"sourced\"]'\n")
    environ = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"), "1")
    after = () if plain else TYPED + QUOTED
    program = ["work", *TYPED, *QUOTED]
    mounts = tuple(f"/{word}:/in{word}" for word in TYPED)
    all_mounts = [str(folder), *mounts]
    binds = [word for mount in all_mounts for word in ("--bind", mount)]
    for given, around in (
        ({"apptainer": NAME, "mounts": mounts}, ["apptainer", "exec", *binds, NAME]),
        (
            {"pyxis": NAME, "mounts": mounts},
            [
                f"--container-image={NAME}",
                f"--container-workdir={folder}",
                f"--container-mounts={','.join(all_mounts)}",
            ],
        ),
        ({"conda": NAME, "modules": program}, []),
        ({"venv": NAME, "modules": program}, []),
    ):
        shape = Shape(plain=plain, nodes=1, command=tuple(program), mpi="pmi2", **given)
        job = start(bin_, shape, *after, **environ, SLURM_JOB_NODELIST="n1")
        said = [json.loads(line) for line in job.out.splitlines() if line.startswith("[")]
        end = [*around, *program, *after]
        assert said[-1][0] == "srun"
        assert said[-1][-len(end) :] == end
        if not around:
            assert ["module", "load", *program] in said
            assert ["sourced"] in said
            assert (["conda", "activate", NAME] in said) == ("conda" in given)


def _numbers(cpulist):
    ends = [part.split("-") for part in cpulist.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


@pytest.mark.parametrize(
    ("array", "job_id"), [({}, "17"), ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "17_2")]
)
def test_a_task_of_an_array_requeues_itself_alone(bin_, array, job_id):
    """To scontrol and scancel the number of an array is all of its tasks."""
    for name, code in (
        ("srun", 'case "$*" in *--mpi=list*) echo pmix pmi2 ;; *) exit 75 ;; esac'),
        ("scontrol", 'echo "scontrol $*"'),
        ("scancel", 'echo "scancel $*"'),
        ("sleep", "exit 0"),
    ):
        (bin_ / name).write_text(f"#!/bin/sh\n{code}\n")
        (bin_ / name).chmod(0o755)
    script = bin_.parent / "job"
    script.write_text(write(Shape(kind="requeue")))
    given = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a", "SLURM_NTASKS_PER_NODE": "1"}
    environ = {**given, **array, "HPCDIST_LAUNCHER": "srun", "PATH": f"{bin_}:{os.environ['PATH']}"}
    assert f"scontrol requeue {job_id}\n" in run(["bash", str(script)], bin_.parent, environ).out
    script.write_text(script.read_text().replace("step=$!", "step=$!; kill -USR1 $$", 1))  # as at the time limit
    told = run(["bash", str(script)], bin_.parent, environ)
    assert f"scancel --signal=USR1 {job_id}\n" in told.out, told
