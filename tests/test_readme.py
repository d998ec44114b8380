"""README: its programs run and print what it says, its files, pictures and commands exist, and it is one page."""

import re
from pathlib import Path

import pytest
from pages import execute, parse

from hpcdist.tools.jobscript import PMIS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SLURM = (ROOT / "docs" / "start" / "slurm.md").read_text()


@pytest.mark.both
def test_its_examples_run(tmp_path):
    assert execute([parse("README", README)], tmp_path) == {"README": []}


def test_it_is_one_page():
    """Without the lines that a reader does not see."""
    seen = re.sub(r"<!--.*?-->\n", "", README, flags=re.DOTALL)
    assert len(seen.splitlines()) <= 130
    assert len(README.split()) <= 650
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


def test_its_first_screen_has_code_beside_a_picture():
    """Six lines, narrow enough to stand beside it; the picture fits a phone."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 6 and max(map(len, lines)) <= 48
    assert README.index("<img ") < README.index(code) < README.index("\n## ")
    assert re.search(r'<svg [^>]*viewBox="0 0 400 ', (ROOT / "docs" / "pictures" / "concat.svg").read_text())


def test_the_commands_of_srun_start_the_mpi_that_the_shell_loads():
    """The cluster's Open MPI, in README's commands and in the page's job script. MPICH aborts under PMIx."""
    assert re.search(r"^\$ module load python openmpi && .* && pip install \.$", README, re.MULTILINE)
    (script,) = re.findall(r"^```bash\n#!.*?^```$", SLURM, re.MULTILINE | re.DOTALL)
    assert re.search(r"^set -e; module load python openmpi; source ~/env/bin/activate$", script, re.MULTILINE)
    for text in (README, script):
        assert re.findall(r"^\+?srun --kill-on-bad-exit=1 --mpi=(\w+) ", text, re.MULTILINE) == [*PMIS["Open MPI"]]


def test_what_was_never_run_is_said_where_readme_leads():
    top = " ".join(README.partition("\n## ")[0].split())
    assert "not yet on a real cluster or on several GPUs" in top and "](docs/tested.md)" in top
    page = " ".join((ROOT / "docs" / "tested.md").read_text().partition("\n## ")[0].split())
    for what in ("Never run:", "several GPUs", "InfiniBand", "Lustre"):
        assert what in page


def test_the_picture_of_the_benchmarks_has_the_fastest_way_by_hand_and_says_where_it_was_measured():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    pictures = re.findall(r"\(../(benchmarks/results/\S+-ragged-concat\.svg)\)", text)
    assert len(pictures) == 2
    for picture in pictures:
        text = (ROOT / picture).read_text()
        assert "mpi4py Allgatherv, counts known, preallocated" in text
        assert "one node, 2 cores" in text


def test_no_page_installs_from_an_index_that_does_not_have_it():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "hpcdist" / "errors" / "pages").glob("*.md"), ROOT / "README.md"]
    assert len(pages) > 80
    for page in pages:
        assert not re.search(r"pip install\s+['\"]?hpcdist\b", page.read_text()), page
