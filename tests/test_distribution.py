"""What is published: the source distribution holds all that the tests need, and the wheel works in another folder."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import release
import yaml

import hpcdist
from hpcdist.launch.launcher import without_launcher
from hpcdist.process.startup import OLDEST

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 110  # seconds for one of pip's commands, on a machine that may be busy
LINKS = re.compile(r"\]\(([^)\s]+)\)")
pytestmark = pytest.mark.timeout(240)


def _run(*command, cwd):
    environ = without_launcher(os.environ)
    environ.pop("PYTHONPATH", None)
    environ["PIP_CONSTRAINT"] = (ROOT / ".ci" / "constraints.txt").as_uri()  # pip splits a path at blanks
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _files():
    """All files of the project: those that git knows or would add; of an unpacked source distribution, what it says."""
    if (ROOT / ".git").exists():
        listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    else:
        listed = (ROOT / "hpcdist.egg-info" / "SOURCES.txt").read_text()
    return {name for name in listed.splitlines() if (ROOT / name).is_file() and not name.startswith("hpcdist.egg")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the source distribution, and with the wheel that was built from it, not from the checkout."""
    # From a copy: setuptools leaves files in its folder, and takes what lies about there.
    checkout = tmp_path_factory.mktemp("checkout")
    for name in _files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    folder = tmp_path_factory.mktemp("dist")
    release.build(checkout, folder)  # twine finds nothing wrong, too
    return folder


def _only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def sdist(dist):
    """Name -> text of each file in the source distribution."""
    with tarfile.open(_only(dist, "*.tar.gz")) as archive:
        files = {member.name.split("/", 1)[1]: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read().decode(errors="replace") for name, file in files.items() if file is not None}


def test_the_source_distribution_is_the_project(sdist):
    """The tests with their helpers, the benchmarks, the job scripts, the changes, CI."""
    made = {name for name in sdist if name == "PKG-INFO" or name.startswith("hpcdist.egg-info/")}
    assert set(sdist) - made == _files()


def test_every_link_leads_somewhere(sdist):
    """A package index shows one page alone, without the files beside it, and gives its headings no names."""
    pages = {name: LINKS.findall(text) for name, text in sdist.items() if name.endswith(".md")}
    assert any(pages.values())
    assert not pages["docs/package-index.md"]
    for page, links in pages.items():
        for link in links:
            beside = os.path.normpath(Path(page).parent / link.split("#")[0]) in sdist
            assert link.startswith("https://") or beside, f"{page}: {link}"


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    with zipfile.ZipFile(_only(dist, "*.whl")) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in _files() if name.startswith("hpcdist/")}


def test_the_changes_are_one_page_and_begin_with_this_version():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 60
    assert next(line for line in lines if line.startswith("## ")).split()[1] == hpcdist.__version__


def test_the_command_hpcdist(tmp_path):
    """It is each of the commands; an unknown one is one line."""
    command = Path(sys.executable).with_name("hpcdist")
    for words, status, text in (
        (["ls", "no.h5"], 2, "hpcdist ls: error: no.h5: no such file"),
        (["stage-env", "--help"], 0, "usage: hpcdist stage-env"),
        (["explain", "HD401"], 0, "# HD401: "),
        (["gathr"], 2, "hpcdist: error: argument COMMAND: invalid choice: 'gathr' (choose from "),
        (["--help"], 0, "usage: hpcdist"),
        (["--version"], 0, f"hpcdist {hpcdist.__version__}\n"),
        (["-V"], 0, f"hpcdist {hpcdist.__version__}\n"),
    ):
        done = subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == status and text in done.stdout + done.stderr, done


def test_the_recipes_are_of_this_version_and_need_what_setup_cfg_needs(dist):
    """Names differ: pytorch, py-torch, PyTorch. EasyBuild's versions are exact: those of a toolchain."""
    sdist = _only(dist, "*.tar.gz")
    spack, conda, easybuild = (path.read_text() for path in release.write_recipes(sdist))
    checksum = hashlib.sha256(sdist.read_bytes()).hexdigest()
    for text in (spack, conda, easybuild):
        assert hpcdist.__version__ in text and checksum in text and not re.search(r"@[A-Z0-9]+@", text)
    recipe = yaml.safe_load(conda)
    place = recipe["source"]["path"].replace("${{ name }}-${{ version }}", f"hpcdist-{hpcdist.__version__}")
    assert (dist / "packaging" / "conda" / place).resolve() == sdist
    needs = {"python": recipe["context"]["python_min"]}
    needs |= dict(re.findall(r"^([\w-]+) >=([\d.]+)$", "\n".join(recipe["requirements"]["run"]), re.MULTILINE))
    depends = dict(re.findall(r'depends_on\("(?:py-)?(\w+)@([\d.]+):', spack))
    del depends["setuptools"]
    for found in (needs, depends):
        names = {"pytorch": "torch", "python-xxhash": "xxhash"}
        bounds = {names.get(name, name): _numbers(version) for name, version in found.items()}
        assert bounds == {name.lower(): _numbers(version) for name, version in OLDEST.items()}


def _numbers(version):
    """6 and 6.0 are the same."""
    major, _, minor = version.partition(".")
    return [int(major), int(minor or 0)]
