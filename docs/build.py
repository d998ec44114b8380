"""``python docs/build.py``: make the documentation a site in build/site, and check it; status 1 if anything is wrong.

The pages are those of docs/, the benchmarks' tables, the changes, and the pages of the error codes, which the package
holds; these are not in the menu. Pages link to one another by their paths in the repository; a link to a file that is
not in the site becomes text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
CONFIG = ROOT / "build" / "mkdocs.yml"
# Folder or file of the repository -> where the site has it.
SOURCES = {
    "docs": "",
    "benchmarks/README.md": "benchmarks/tables.md",
    "benchmarks/MEASUREMENTS.md": "benchmarks/measurements.md",
    "benchmarks/results": "benchmarks/results",
    "benchmarks/suites": "benchmarks/suites",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "hpcdist/errors/pages": "errors",
}
KINDS = (".md", ".svg", ".png", ".css", ".js")
LEFT_OUT = (  # 5,800 lines of tables; what a package index shows, which has no links
    ROOT / "benchmarks" / "results" / "tables.md",
    ROOT / "docs" / "package-index.md",
)
# What these have of a word would come first.
NOT_SEARCHED = ("benchmarks/tables.md", "benchmarks/measurements.md", "benchmarks/results/summary.md", "changes.md")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Return the site's files: path in the repository -> path in the site."""
    found = {}
    for source, place in SOURCES.items():
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in KINDS and file not in LEFT_OUT:
                below = file.relative_to(path).as_posix() if path.is_dir() else ""
                found[file.relative_to(ROOT).as_posix()] = (Path(place) / below).as_posix()
    return found


def page(text: str, source: str, files: dict[str, str]) -> str:
    """Return a page with the links of the site; what is code stays as it is."""

    def link(found: re.Match[str]) -> str:
        picture, label, target, anchor = found.groups()
        if not target or urlsplit(target).scheme:
            return found[0]
        aim = os.path.normpath(Path(source).parent / target)
        if aim not in files:
            return label if (ROOT / aim).exists() else found[0]  # of which zensical says that it leads nowhere
        here = os.path.relpath(files[aim], Path(files[source]).parent)
        return f"{picture}[{label}]({here}{anchor or ''})"

    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    text = _LINK.sub(link, _FENCE.sub(keep, text))
    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], text)


def paths(nav: list[Any]) -> list[str]:
    """Return the pages of `nav`."""
    values = [value for entry in nav for value in (entry.values() if isinstance(entry, dict) else [entry])]
    return [path for value in values for path in (paths(value) if isinstance(value, list) else [value])]


def assemble() -> list[str]:
    """Put pages and configuration into the folder build; return what is wrong with them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    files = sources()
    for source, place in files.items():
        (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
        if place.endswith(".md"):
            head = "---\nsearch:\n  exclude: true\n---\n\n" if place in NOT_SEARCHED else ""
            (PAGES / place).write_text(head + page((ROOT / source).read_text(), source, files))
        else:
            shutil.copy(ROOT / source, PAGES / place)
    config = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())
    CONFIG.write_text(yaml.safe_dump({**config, "docs_dir": PAGES.name, "site_dir": SITE.name}, sort_keys=False))
    there = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")}
    shown = {*paths(config["nav"])}
    wrong = [f"docs/mkdocs.yml: nav has {path}, which does not exist" for path in sorted(shown - there)]
    left = sorted(path for path in there - shown if not path.startswith("errors/"))
    return wrong + [f"docs/mkdocs.yml: nav lacks {path}" for path in left]


class Parsed(HTMLParser):
    """What a page of the site holds and what it refers to.

    Attributes:
        ids: names that a link can lead to.
        links: targets of its links.
        assets: what a browser loads with it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.assets.append(values.get("href", ""))
        elif "src" in values:
            self.assets.append(values["src"])
        if "mermaid" in values.get("class", "").split():
            self.assets.append("https://unpkg.com/mermaid")  # which the theme would load for it


def check() -> list[str]:
    """Return which links of the built pages lead nowhere, and what they would load from other hosts."""
    pages = {path: Parsed(path.read_text()) for path in sorted(SITE.rglob("*.html"))}
    wrong = []
    for path, parsed in pages.items():
        name = path.relative_to(SITE).as_posix()
        wrong += [f"{name} loads {asset}" for asset in parsed.assets if urlsplit(asset).netloc]
        for target in [*parsed.links, *parsed.assets] if name != "404.html" else []:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            if not aim.exists():
                wrong.append(f"{name}: {target} does not exist")
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].ids:
                wrong.append(f"{name}: {target}: no such heading")
    for path in SITE.rglob("*.css"):
        wrong += [
            f"{path.name} loads {url}"
            for url in re.findall(r"(?:url\(|@import )[\"']?(https?:[^\"')]+)", path.read_text())
        ]
    return sorted(set(wrong))


def build() -> list[str]:
    """Run zensical; return what it has warned of."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(CONFIG)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    output = done.stdout + done.stderr
    if done.returncode or re.search(r"warning|error", output, re.IGNORECASE):
        return [re.sub(r"\x1b\[[\d;]*m", "", output)]
    return []


def main() -> int:
    wrong = assemble() or build() or check()
    print("\n".join(wrong) or f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}/index.html")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
