"""The job scripts: what is written for a shape, letter by letter, and what no shape is.

They run in test_jobscript_runs.py, and on Slurm in tests/cluster.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Job, run
from mpi4py import MPI

from hpcdist.errors import InputError
from hpcdist.tools import jobscript
from hpcdist.tools.jobscript import KINDS, OTHER_PMIS, PMIS, Shape, main, write

SCRIPTS = Path(__file__).parents[3] / "jobscripts"
GOLDEN = Path(__file__).parent / "golden"

# Files in jobscripts/, and the options that write them.
HANDED_OUT = {
    **{f"{kind}.sbatch": f"--kind {kind}" for kind in KINDS},
    **{f"train.{name}": f"--kind train --scheduler {name} --gpus-per-node 4" for name in ("pbs", "flux", "lsf")},
    "plain.sbatch": "--plain --gpus-per-node 4 --mpi pmix",
}
# Files in golden/, likewise: what the others do not show.
OTHERS = {
    "gpu-4x8.sbatch": "--nodes 4 --gpus-per-node 8",
    "cpu-mpich.sbatch": "--ntasks-per-node 64 --time 2:30:00 --partition long --account p123 --launcher mpirun "
    "--mpi pmi2 --module gcc/13 --module mpich --venv env -- python train.py --lr '0.1 0.2'",
    "array-gpu.sbatch": "--kind array --array 0-99%10 --nodes 1 --gpus-per-node 2 --ntasks-per-node 4 --name sweep",
    "train-gpus.sbatch": "--kind train --nodes 8 --gpus-per-node 4 --venv env",
    "requeue-days.sbatch": "--kind requeue --time 2-12 --warning 300 --cpus-per-task 16 -- ./solver --input %a.nml",
    "site.sbatch": "--mem 64G --qos high --constraint 'a100&nvlink' --exclusive --output logs/%x-%j.out --conda torch "
    "--sbatch mail-type=END --sbatch M=tier0 --directive hold --gpus-per-node a100:4 --bind cores --mpi default",
    "staged-env.sbatch": "--kind train --venv /shared/env --stage-env --gpus-per-node 4",
    "staged-env.pbs": "--kind train --conda torch --stage-env --scheduler pbs --launcher pals",
    "apptainer.sbatch": "--apptainer images/torch.sif --mount /scratch --mount /data:/in --gpus-per-node 2",
    "pyxis.sbatch": "--pyxis nvcr.io#nvidia/pytorch:26.01-py3 --mount /scratch --gpus-per-node 8 --module enroot",
    "array.pbs": "--kind array --scheduler pbs --launcher pals --bind cores --mem 32G --constraint gpu_model=a100 "
    "--queue debug --account p1 --exclusive --directive l=filesystems=home --output logs",
    "array.lsf": "--kind array --scheduler lsf --launcher mpirun --array 1-9%3 --bind cores --mem 8G --gpus-per-node 2 "
    "--ntasks-per-node 4 --constraint 'model==x' --queue q --account p1 --exclusive --directive cwd=/work",
    "cores.flux": "--scheduler flux --bind cores --exclusive --queue pbatch --account p1 --constraint host:n[1-8] "
    "--output out.{{id}} --directive setattr=system.x=1 --time 90",
    "again.sbatch": "--kind requeue --restarts 3 --spare-nodes 1 --checkpoint 'my model.h5' -- python train.py",
    "again.pbs": "--kind train --scheduler pbs --restarts 3 --spare-nodes 2 --gpus-per-node 4 -- python train.py",
    "again-pals.pbs": "--kind array --scheduler pbs --launcher pals --restarts 1",
    "plain.pbs": "--plain --scheduler pbs --launcher pals --gpus-per-node 4 -- python train.py --epochs 3",
    "plain.flux": "--plain --scheduler flux --kind train --conda /envs/torch",
    "plain.lsf": "--plain --scheduler lsf --gpus-per-node 6 --cpus-per-task 7 --module spectrum-mpi --time 1-0",
}
PATHS = [*(SCRIPTS / name for name in HANDED_OUT), *(GOLDEN / name for name in OTHERS)]


def written(capsys, words):
    main(words)
    return capsys.readouterr().out


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_what_is_written(path, capsys):
    """Letter by letter. To change it on purpose: HPCDIST_TEST_WRITE=1 pytest tests/tools/jobscript; look at the diff.

    A script tells how it was written, and has lines that can be read.
    """
    text = written(capsys, shlex.split((HANDED_OUT if path.parent == SCRIPTS else OTHERS)[path.name]))
    if os.environ.get("HPCDIST_TEST_WRITE"):
        path.write_text(text)
    assert text == path.read_text()
    (told,) = re.findall(r"^# Written by:\s(?:#\s+)?python -m hpcdist jobscript(.*)$", text, re.MULTILINE)
    assert written(capsys, shlex.split(told)) == text
    assert not re.search(r".{321}|[ \t]$|\n\n\n", text, re.MULTILINE)


def test_a_directive_is_one_word_of_its_line():
    """Quotes that are right already stay. The line of --gpus-per-node gives way to the directive gres."""
    for value, written in (
        ("a b", "'a b'"), ('"a b"', '"a b"'), ("it's", "'it'\"'\"'s'"), ("a#b", "'a#b'"), ("'a #b'", "'a #b'")
    ):  # fmt: skip
        text = write(Shape(directives=(f"comment={value}", f"C={value}", "hold")))
        assert f"#SBATCH --comment={written}\n#SBATCH -C {written}\n#SBATCH --hold\n" in text
    for gres, count in (("gpu:2", 2), ("lustre:1,gpu:a100:2", 2), ("gpu", 1), ("lustre:2", None)):
        text = write(Shape(kind="gpu", gpus_per_node="2" if count != 1 else "1", directives=(f"gres={gres}",)))
        assert f"#SBATCH --gres={gres}\n" in text and ("#SBATCH --gpus-per-node=" in text) == (count is None)
    with pytest.raises(InputError, match=r"--gpus-per-node 4: the directive gres asks for 2 \[HD801\]"):
        write(Shape(kind="gpu", directives=("gres=gpu:2",)))


def test_there_is_no_other_script():
    assert sorted(path.name for path in SCRIPTS.iterdir()) == sorted(HANDED_OUT)
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(OTHERS)


def test_plain_decides_when_it_is_written(tmp_path, monkeypatch, capsys):
    """By the MPI library of this environment, and by what srun offers, if it is here."""
    needed, srun = PMIS.get(MPI.get_vendor()[0], OTHER_PMIS)[0], tmp_path / "srun"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for code, decided in (
        (f"echo MPI plugin types are... none {needed} other >&2", [f"export SLURM_MPI_TYPE={needed}"]),
        ("echo MPI plugin types are... none other >&2", []),
        ("echo no Slurm here; exit 1", []),
    ):
        srun.write_text(f"#!/bin/sh\n{code}\n")
        srun.chmod(0o755)
        assert mpi_type(written(capsys, ["--plain"])) == decided


def mpi_type(text):
    return [line for line in text.splitlines() if "SLURM_MPI_TYPE" in line]


def test_plain_with_a_container_does_not_ask_this_machine(monkeypatch, capsys):
    """The image brings the MPI library."""
    monkeypatch.setattr(jobscript, "printed", lambda command: "Cray MPICH" if "srun" not in command else "cray_shasta")
    for words, decided in (
        ("--plain", ["export SLURM_MPI_TYPE=cray_shasta"]),
        ("--plain --pyxis x", ["export SLURM_MPI_TYPE=pmix"]),
        ("--plain --pyxis x --mpi pmi2", ["export SLURM_MPI_TYPE=pmi2"]),
        ("--plain --apptainer x", []),
    ):
        assert mpi_type(written(capsys, words.split())) == decided, words


def test_the_host_is_not_asked_for_what_is_in_a_container_of_pyxis():
    """Its python may lack mpi4py and hpcdist, and the script would end."""
    for kind in ("cpu", "train", "staged", "array", "requeue"):
        assert "python -c" not in write(Shape(kind=kind, pyxis="x")), kind


def test_salloc_gets_the_options_as_sbatch_reads_them(tmp_path):
    salloc, script = tmp_path / "salloc", tmp_path / "job"
    salloc.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    salloc.chmod(0o755)
    text = write(Shape(kind="interactive", directives=("p=debug", 'comment="two words"', "hold", "mail-user='a b'")))
    end = ["-p", "debug", "--comment=two words", "--hold", "--mail-user=a b", "bash", str(script), "python", "a b.py"]
    for given, status in ((text, 0), (text.replace("'a b'", "'a b"), 1)):
        script.write_text(given)
        done = run(["bash", script, *end[-2:]], env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
        words = done.out.splitlines()
        assert done.status == status
        assert status or words[:2] == ["--job-name=hpcdist-interactive", "--nodes=2"]
        assert words[-len(end) :] == ([] if status else end)


def test_a_launcher_that_is_none_is_refused(tmp_path):
    (tmp_path / "job").write_text(write(Shape()))
    environ = dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"), "1"
    )
    (tmp_path / "srun").write_text("#!/bin/sh\necho pmix\n")
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    environ |= {"PATH": path, "HPCDIST_LAUNCHER": "pigeon", "SLURM_JOB_NODELIST": "n1"}
    done = run(["bash", "job"], tmp_path, environ)
    assert done.status == 2 and "HPCDIST_LAUNCHER=pigeon: expected srun or mpirun" in done.err, done


def test_shellcheck_finds_nothing():
    path = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(
        [path, "--shell=bash", "--severity=warning", *PATHS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout


MISTAKES = {
    "--nodes 0": "--nodes 0: expected at least 1",
    "--ntasks-per-node 0": "--ntasks-per-node 0: expected at least 1",
    "--cpus-per-task -1": "--cpus-per-task -1: expected at least 1",
    "--kind gpu --gpus-per-node 0": "--gpus-per-node 0: expected at least 1",
    "--gpus-per-node -2": "--gpus-per-node -2: expected a number, or under Slurm TYPE:NUMBER",
    "--gpus-per-node 8 --ntasks-per-node 4": "--gpus-per-node 8: more than the 4 ranks of a node",
    "--gpus-per-node 4 --ntasks-per-node 8": "--ntasks-per-node 8: more than the 4 GPUs of a node",
    "--kind train --gpus-per-node 4 --ntasks-per-node 8": "--ntasks-per-node 8: more than the 4 GPUs of a node",
    "--time soon": "--time soon: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds",
    "--output '#x'": "--output '#x': expected a path without spaces, quotes and #",
    "--time \u0663": "--time \u0663: expected minutes",
    "--time 0:00": "--time 0:00: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds, above 0",
    "--time 1-": "--time 1-: expected minutes",
    "--kind requeue --time 2": "--warning 120: expected 60 seconds at least, and less than the time limit of 120",
    "--kind requeue --warning 10": "--warning 10: expected 60 seconds at least",
    "--kind array --array 0..3": "--array 0..3: expected indices such as 0-3",
    "--partition 'a b'": "--partition 'a b': expected letters",
    "--qos 'a b'": "--qos 'a b': expected letters",
    "--gpus-per-node four": "--gpus-per-node four: expected a number, or under Slurm TYPE:NUMBER",
    "--scheduler pbs --gpus-per-node a100:4": "--gpus-per-node a100:4: expected a number, or under Slurm TYPE:NUMBER",
    "--mem plenty": "--mem 'plenty': expected a number with K, M, G or T",
    "--scheduler pbs --mem 0": "--mem '0': expected a number with K, M, G or T",
    "--output 'a b'": "--output 'a b': expected a path without spaces, quotes and #",
    "--constraint 'a`b'": "expected the scheduler's words, without quotes",
    "--constraint 'a & b'": "--constraint 'a & b': expected the scheduler's words, without quotes and spaces: a&b",
    "--scheduler flux --constraint 'a & b'": "without quotes and spaces: a&b",
    "--scheduler pbs --constraint 'a & b'": "without quotes and spaces: a&b",
    "--sbatch=--hold": "--directive '--hold': expected KEY=VALUE or KEY, KEY without dashes before it",
    "--directive 'a=b\nc'": "expected KEY=VALUE or KEY",
    "--mpi 'pmi 2'": "--mpi 'pmi 2': expected auto, default, or a name that srun --mpi=list shows",
    "--venv a --conda b": "--venv --conda: expected one of them: each brings the Python of the ranks",
    "--mount /scratch": "--mount /scratch: expected --apptainer or --pyxis, too",
    "--apptainer x.sif --mount '/my data'": "--mount '/my data': expected FOLDER or FOLDER:INSIDE",
    "--pyxis x --launcher mpirun": "--launcher mpirun: --pyxis is an option of srun",
    "--bind gpu": "--bind gpu: expected --gpus-per-node, too",
    "--bind gpu --gpus-per-node 2 --ntasks-per-node 4": "--ntasks-per-node 4: more than the 2 GPUs of a node",
    "--plain --stage-env": "--stage-env: not for containers, --plain and kind interactive",
    "--apptainer x.sif --stage-env": "--stage-env: not for containers, --plain and kind interactive",
    "--plain --bind cores": "--bind cores: --plain leaves it to the cluster",
    "--plain --kind requeue": "--kind requeue: expected one of cpu, gpu, train with --plain",
    "--scheduler pbs --kind requeue": "--kind requeue: expected one of cpu, gpu, train, staged, array for --scheduler",
    "--scheduler flux --kind array": "--kind array: expected one of cpu, gpu, train, staged for --scheduler flux",
    "--scheduler flux --mem 4G": "--mem 4G: --scheduler flux has no such option",
    "--scheduler lsf --mem 4G": "--mem 4G: jsrun's nodes are whole; it is for --launcher mpirun",
    "--scheduler pbs --mpi pmix": "--mpi pmix: --scheduler pbs has no such option: it is one of srun",
    "--scheduler pbs --qos a": "--qos a: --scheduler pbs has no such option",
    "--scheduler pbs --launcher srun": "--launcher srun: expected one of mpirun, pals",
    "--scheduler pbs --kind array --array 1,5": "--array 1,5: expected indices such as 0-3 or 0-99%10",
    "--scheduler lsf --kind array --array 0-3": "--array 0-3: LSF counts from 1: 1-4",
    "--restarts -1": "--restarts -1: expected at least 0",
    "--restarts 1 --spare-nodes -1": "--spare-nodes -1: expected at least 0",
    **{
        f"--restarts 1 {option}": "--restarts 1: not for containers, --plain, --stage-env, kind interactive"
        for option in ("--plain", "--pyxis x", "--stage-env", "--kind interactive", "--launcher mpirun")
    },
    "--scheduler flux --restarts 1": "--restarts 1: --scheduler flux has no such option",
    "--scheduler lsf --restarts 1": "--restarts 1: --scheduler lsf has no such option",
    "--spare-nodes 1": "--restarts 0: expected at least 1, with --spare-nodes or --checkpoint",
    "--checkpoint x": "--restarts 0: expected at least 1, with --spare-nodes or --checkpoint",
    "--array 0-3": "--array 0-3: it is an option of --kind array",
    "--kind train --warning 300": "--warning 300: it is an option of --kind requeue",
    "--plain --launcher mpirun": "--launcher mpirun: with --plain srun starts the ranks",
    "--kind interactive --output x": "--output x: salloc, of kind interactive, has no such option",
    "--name 'x\n#SBATCH --nodes=9'": "expected letters",
    "--venv 'x\nrm'": "a line break cannot be in a job script's line",
    "--kind tpu": "argument --kind: invalid choice: 'tpu'",
    "--nodes many": "argument --nodes: invalid int value: 'many'",
    "-o ''": "-o/--script: expected a name, got an empty one",
    "-o none/x.sbatch": "none/x.sbatch: cannot be written: No such file or directory",
    **{f"{option} {'9' * 5000}": option for option in ("--gpus-per-node", "--time")},  # no int for Python
}


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: words[:60])
def test_what_is_no_shape_is_one_clear_line_and_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("hpcdist jobscript: error: ")
    assert MISTAKES[words] in err
    assert "usage" not in err


def test_a_time_limit_in_all_of_slurms_ways():
    times = {"3": 180, "2:30": 150, "1:00:05": 3605, "1-0": 86400, "1-2:3": 93780, "1-2:3:4": 93784}
    for time, seconds in times.items():
        write(Shape(kind="requeue", time=time, warning=seconds - 1))
        with pytest.raises(InputError, match=f"the time limit of {seconds} seconds"):
            write(Shape(kind="requeue", time=time, warning=seconds))


def test_the_command_writes_a_file_and_needs_no_mpi(tmp_path):
    code = (
        "import runpy, sys; sys.argv = ['', '--nodes', '3', '-o', 'x.sbatch']\n"
        "runpy.run_module('hpcdist.tools.jobscript', run_name='__main__')\n"
        "sys.exit('mpi4py' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], tmp_path) == Job(0, "", "")
    assert (tmp_path / "x.sbatch").read_text() == write(Shape(nodes=3), ["--nodes", "3", "-o", "x.sbatch"])


def test_words_that_are_not_text_come_back_as_the_bytes_that_they_were(tmp_path):
    """Whatever the encoding of standard output."""
    environ = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "hpcdist", "jobscript", "--", "python", b"a\xff.py", "\u00e9".encode()]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=300, check=True)
    assert b"program=(python 'a\xff.py' '\xc3\xa9')\n" in done.stdout
    path = tmp_path / "x.sbatch"
    main(["-o", str(path), "--", "python", os.fsdecode(b"a\xff.py")])
    assert b"program=(python 'a\xff.py')\n" in path.read_bytes()
