"""Build a release of the last commit into dist/, check it, install it, and run the demo from it: make release.

It writes the wheel, the source distribution, and in dist/packaging the recipes beside this file with the version and
the checksum of the source distribution. It uploads nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Recipe beside this file -> its name in dist/packaging.
RECIPES = {
    "spack/package.py": "spack/packages/py_hpcdist/package.py",
    "conda/recipe.yaml": "conda/recipe.yaml",
    "easybuild/hpcdist.eb": "easybuild/hpcdist-{version}-foss-2025b.eb",
}
DEADLINE = 1800  # seconds for one command; pip may download torch


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside of the checkout's own modules, and return what it prints.

    Raises:
        SystemExit: if it fails, with its output.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["PIP_CONSTRAINT"] = (ROOT / ".ci" / "constraints.txt").as_uri()  # pip splits a path at blanks
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}status {done.returncode}")
    return done.stdout


def build(source: Path, dist: Path) -> tuple[Path, Path]:
    """Build the source distribution of the folder `source`, and the wheel from it; return wheel and sdist."""
    run(sys.executable, "-m", "build", "--outdir", dist, source, cwd=dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist, cwd=dist)
    return wheel, sdist


def version_of(sdist: Path) -> str:
    return sdist.name.removeprefix("hpcdist-").removesuffix(".tar.gz")


def write_recipes(sdist: Path) -> list[Path]:
    """Write the recipes beside the source distribution, and return them."""
    values = {"@VERSION@": version_of(sdist), "@SHA256@": hashlib.sha256(sdist.read_bytes()).hexdigest()}
    written = []
    for source, place in RECIPES.items():
        text = Path(__file__).with_name(source.split("/")[0]).joinpath(source.split("/")[1]).read_text()
        for name, value in values.items():
            text = text.replace(name, value)
        path = sdist.parent / "packaging" / place.format(version=values["@VERSION@"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def demo(file: Path, folder: Path, version: str) -> str:
    """Install a wheel or source distribution with an MPI into a new environment; return what the demo prints."""
    venv.create(folder / "env", with_pip=False)
    scripts = folder / "env" / "bin"
    run(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q", f"{file}[mpich]", cwd=folder)
    if (said := run(scripts / "hpcdist", "--version", cwd=folder)) != f"hpcdist {version}\n":
        raise SystemExit(f"{file.name}: --version prints {said!r}")
    return run(scripts / "mpirun", "-n", "4", scripts / "python", "-m", "hpcdist.gather", cwd=folder)


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commit = folder / "commit"  # what git has, without what lies in the checkout besides
        run("git", "clone", "-q", ROOT, commit, cwd=folder)
        wheel, sdist = build(commit, dist)
        for file in (wheel, sdist):
            print(f"{file.name}: built and checked; installing it for the demo", flush=True)
            place = folder / file.suffix[1:]
            place.mkdir()
            print(demo(file, place, version_of(sdist)), end="", flush=True)
            shutil.rmtree(place)
        for path in write_recipes(sdist):
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
