"""README: its programs run and print what it says, its files, pictures and commands exist, and it is one page."""

import re
from pathlib import Path

from pages import execute, parse

from hpcdist.tools.jobscript import PMIS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_examples_run(tmp_path):
    assert execute([parse("README", README)], tmp_path) == {"README": []}


def test_it_is_one_page():
    """Without the lines that a reader does not see."""
    seen = re.sub(r"<!--.*?-->\n", "", README, flags=re.DOTALL)
    assert len(seen.splitlines()) <= 130
    for command in ("make demo", "make test"):
        assert command in README


def test_what_it_names_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
    modules = {found.replace(".", "/") for found in re.findall(r"python -m (hpcdist[.\w]*)", README)}
    assert modules
    for module in modules:
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), module


def test_its_commands_of_srun_start_the_mpi_that_it_loads():
    """The cluster's Open MPI, in the shell that installs and in the job script. MPICH aborts under PMIx."""
    assert re.search(r"^\$ module load python openmpi && .* && pip install \.$", README, re.MULTILINE)
    assert re.search(r"^set -e; module load python openmpi; source ~/env/bin/activate$", README, re.MULTILINE)
    assert re.findall(r"^\+?srun --kill-on-bad-exit=1 --mpi=(\w+) ", README, re.MULTILINE) == 2 * [*PMIS["Open MPI"]]
    (script,) = re.findall(r"^```bash\n#!.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert script in (ROOT / "docs" / "start" / "slurm.md").read_text()


def test_what_was_never_run_stands_at_the_top():
    top = " ".join(README.partition("\n## ")[0].replace("\n>", "").split())
    for what in ("Never run:", "several GPUs", "InfiniBand", "Lustre"):
        assert what in top


def test_its_picture_has_the_fastest_way_by_hand_and_says_where_it_was_measured():
    (picture,) = re.findall(r"\((benchmarks/results/\S+\.svg)\)", README)
    text = (ROOT / picture).read_text()
    assert "mpi4py Allgatherv, counts known, preallocated" in text
    assert "one node, 2 cores" in text


def test_no_page_installs_from_an_index_that_does_not_have_it():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "hpcdist" / "errors" / "pages").glob("*.md"), ROOT / "README.md"]
    assert len(pages) > 90
    for page in pages:
        assert not re.search(r"pip install\s+['\"]?hpcdist\b", page.read_text()), page
