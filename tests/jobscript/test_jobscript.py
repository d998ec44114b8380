"""The job scripts: what is written for a shape, letter by letter, and what no shape is. On Slurm: tests/cluster."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.errors import InputError
from hpcdist.jobscript import KINDS, Shape, write
from hpcdist.jobscript.__main__ import main

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "jobscripts"
GOLDEN = Path(__file__).parent / "golden"

# Files in tests/golden, and the options that write them.
OTHERS = {
    "gpu-4x8.sbatch": "--nodes 4 --gpus-per-node 8",
    "cpu-mpich.sbatch": "--ntasks-per-node 64 --time 2:30:00 --partition long --account p123 --launcher mpirun "
    "--mpi pmi2 --module gcc/13 --module mpich --venv env -- python train.py --lr '0.1 0.2'",
    "array-gpu.sbatch": "--kind array --array 0-99%10 --nodes 1 --gpus-per-node 2 --ntasks-per-node 4 --name sweep",
    "train-gpus.sbatch": "--kind train --nodes 8 --gpus-per-node 4 --venv env",
    "requeue-days.sbatch": "--kind requeue --time 2-12 --warning 300 --cpus-per-task 16 -- ./solver --input %a.nml",
}


def written(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    main(words)
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_jobscripts_holds_what_is_written_by_default(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If you change one on purpose: python -m hpcdist.jobscript --kind KIND -o jobscripts/KIND.sbatch"""
    text = (SCRIPTS / f"{kind}.sbatch").read_text()
    assert text == write(Shape(kind=kind))
    assert text == written(capsys, ["--kind", kind])


def test_jobscripts_holds_nothing_else() -> None:
    assert sorted(path.name for path in SCRIPTS.iterdir()) == sorted(f"{kind}.sbatch" for kind in KINDS)
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(capsys, shlex.split(OTHERS[name])) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("path", [*SCRIPTS.iterdir(), *GOLDEN.iterdir()], ids=lambda path: path.name)
def test_a_script_says_how_it_was_written(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it is bash, with lines that can be read."""
    lines = path.read_text().splitlines()
    words = shlex.split(lines[lines.index("# Written by:") + 1].removeprefix("# "))
    assert words[:3] == ["python", "-m", "hpcdist.jobscript"]
    assert written(capsys, words[3:]) == path.read_text()
    assert max(map(len, lines)) <= 240
    assert subprocess.run(["bash", "-n", path], timeout=10).returncode == 0


MISTAKES = {
    "--nodes 0": "--nodes 0: expected at least 1",
    "--ntasks-per-node 0": "--ntasks-per-node 0: expected at least 1",
    "--cpus-per-task -1": "--cpus-per-task -1: expected at least 1",
    "--kind gpu --gpus-per-node 0": "--gpus-per-node 0: expected at least 1",
    "--gpus-per-node -2": "--gpus-per-node -2: expected at least 1",
    "--gpus-per-node 8 --ntasks-per-node 4": "--gpus-per-node 8: more than the 4 ranks of a node",
    "--gpus-per-node 4 --ntasks-per-node 8": "--ntasks-per-node 8: more than the 4 GPUs of a node",
    "--kind train --gpus-per-node 4 --ntasks-per-node 8": "--ntasks-per-node 8: more than the 4 GPUs of a node",
    "--time soon": "--time soon: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds",
    "--time 0:00": "--time 0:00: expected more than 0 seconds",
    "--time 1-": "--time 1-: expected minutes",
    "--kind requeue --time 2": "--warning 120: expected 60 seconds at least, and less than the time limit of 120",
    "--kind requeue --warning 10": "--warning 10: expected 60 seconds at least",
    "--kind array --array 0..3": "--array 0..3: expected indices such as 0-3",
    "--partition 'a b'": "--partition 'a b': expected letters",
    "--name 'x\n#SBATCH --nodes=9'": "expected letters",
    "--venv 'x\nrm'": "a line break cannot be in a job script's line",
    "--kind tpu": "argument --kind: invalid choice: 'tpu'",
    "--nodes many": "argument --nodes: invalid int value: 'many'",
    "-o none/x.sbatch": "none/x.sbatch: cannot be written: No such file or directory",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_is_no_shape_is_one_clear_line_and_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("hpcdist.jobscript: error: ")
    assert MISTAKES[words] in err
    assert "usage" not in err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("3", 180), ("2:30", 150), ("1:00:05", 3605), ("1-0", 86400), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_a_time_limit_in_all_of_slurms_ways(time: str, seconds: int) -> None:
    write(Shape(kind="requeue", time=time, warning=seconds - 1))
    with pytest.raises(InputError, match=f"the time limit of {seconds} seconds"):
        write(Shape(kind="requeue", time=time, warning=seconds))


@pytest.mark.parametrize("wrong", [{"kind": "tpu"}, {"launcher": "pigeon"}, {"mpi": "pmi7"}])
def test_what_argparse_refuses_the_function_refuses_too(wrong: dict[str, str]) -> None:
    with pytest.raises(InputError, match="expected one of"):
        write(Shape(**wrong))  # type: ignore[arg-type]


def test_the_command_writes_a_file_and_needs_no_mpi(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['', '--nodes', '3', '-o', 'x.sbatch']\n"
        "runpy.run_module('hpcdist.jobscript', run_name='__main__')\n"
        "sys.exit('mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "x.sbatch").read_text() == write(Shape(nodes=3))
