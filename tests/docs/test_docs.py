"""Every example on every page of docs/ runs, and prints what the page says: see helpers/pages.py."""

import re
from pathlib import Path

import docstrings
import pytest
from pages import execute, parse

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {page.name: page for page in docstrings.pages(DOCS / "reference")}
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
GENERATED = re.compile(r"^(<!-- (?:object|help|checks|codes)\b.*?-->\n).*?(?=^<!-- )", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.timeout(600)  # the first test runs the examples of all


@pytest.fixture(scope="module")
def problems(request, tmp_path_factory):
    """Page -> what its examples did wrong, for the pages whose tests were selected."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")} & {
        *PAGES,
        *EXAMPLES,
    }
    pages, wrong = [EXAMPLES[name] for name in EXAMPLES if name in chosen], {}
    for name in sorted(chosen - {*EXAMPLES}):
        try:
            pages.append(parse(name, GENERATED.sub(r"\1", (DOCS / name).read_text())))
        except ValueError as error:
            wrong[name] = [str(error)]
    return {**wrong, **execute(pages, tmp_path_factory.mktemp("pages"))}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name):
    """Files and commands; links are checked by docs/build.py."""
    text, root = (DOCS / name).read_text(), DOCS.parent
    files = re.findall(r"`((?:benchmarks|docs|hpcdist|jobscripts|tests)/[^\s`*<>{}]*|setup\.cfg)`", text)
    missing = [file for file in files if not ((root / file).exists() or (root / f"{file}.py").exists())]
    assert missing == []
    modules = {module.replace(".", "/") for module in re.findall(r"python -m (hpcdist(?:\.\w+)*)", text)}
    assert [m for m in modules if not (root / f"{m}.py").exists() and not (root / m / "__main__.py").exists()] == []


@pytest.mark.parametrize("name", [*PAGES, *EXAMPLES])
def test_the_examples(name, problems):
    assert not problems[name], "\n".join(problems[name])


def test_the_pages_are_not_too_many_nor_too_long():
    """What is made from the package does not count."""
    assert len(PAGES) <= 50
    assert sum(len(GENERATED.sub(r"\1", (DOCS / page).read_text()).split()) for page in PAGES) <= 36_000
