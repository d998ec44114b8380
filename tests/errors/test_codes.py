"""Each code that an error carries has a page, and each page's code is used; codes are never taken back."""

import ast
import builtins
import copy
import pickle
import re
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import pytest
from launch import run

import hpcdist
from hpcdist.errors import (
    FileError,
    HpcdistError,
    RankError,
    coded,
    codes,
    described,
    explain,
    hint,
    reason,
    refusal,
    with_hint,
    without_hint,
)

ROOT = Path(hpcdist.__file__).parent
KEPT = Path(__file__).with_name("codes.txt").read_text().splitlines()
OWN = {"FileError", "HangError", "HpcdistError", "InputError", "LaunchError", "ArgumentError"}
PYTHONS = {name for name in dir(builtins) if name.endswith("Error")}
# Python's own errors that need no code: they are caught within the package, which says more, or are a fault of it.
WITHOUT = {
    "errors.explain", "comm.node_memory", "commands.arrays", "control.codec", "formats.torch_files",
    "formats.numpy_files", "layout.box_sequences", "activity.procstat", "horovod", "comm.tuning", "watch.ras",
    "formats.hdf5",
}  # fmt: skip


@cache
def _trees():
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if not name.startswith("examples")}


def _calls():
    """(module, call, name of the function that is called) of all calls in the package."""
    for module, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield module, node, ast.unparse(node.func).rpartition(".")[2]


def _used():
    """The codes in the package's code, outside of docstrings: literals that are a code and nothing else."""
    constants = (node.value for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and re.fullmatch(r"HD\d{3}", value)}


def test_each_code_has_a_page_and_each_page_is_of_a_code_that_is_used():
    assert set(explain.titles()) == _used() | {line.split()[0] for line in KEPT if line.endswith(" retired")}


def test_the_page_on_errors_lists_the_titles():
    page = (ROOT.parent / "docs" / "reference" / "errors.md").read_text()
    assert re.findall(r"^\| \[(HD\d+)\].* \| (.*) \|$", page, re.MULTILINE) == [*explain.titles().items()]


def test_codes_are_kept():
    """Programs and notes name them: a line of codes.txt is never removed, and no code gets another meaning. One that is
    not used any more keeps its page, and gets the word retired at the end of its line."""
    assert [line.split()[0] for line in KEPT] == list(explain.titles())


def test_titles_are_unique_and_short():
    titles = list(explain.titles().values())
    assert len(set(titles)) == len(titles)
    assert [title for title in titles if not 10 <= len(title) <= 70 or title.endswith(".")] == []


def test_pages_are_short_and_have_the_same_parts():
    """What it means, then causes and what to do as a list, then perhaps an example: half of a terminal."""
    for code in explain.titles():
        text = explain.page(code)
        title, meaning, advice, *examples = text.removesuffix("\n").split("\n\n")
        assert title.startswith(f"# {code}: ") and not meaning.startswith(("#", "-", "```")), code
        assert all(line.startswith(("- ", "  ")) for line in advice.splitlines()), code
        assert len(examples) < 2 and all(example.startswith(("```python\n", "```console\n")) for example in examples)
        assert code[:3] in explain.GROUPS
        assert text.count("\n") <= 15 and max(map(len, text.splitlines())) <= 110, code


def test_every_error_of_the_package_has_a_code():
    """It is made of a code and a message, or of a message that was made so elsewhere, never of a bare text."""
    for module, call, name in _calls():
        if name in OWN and call.args and module != "errors":
            bare = len(call.args) == 1 and isinstance(call.args[0], ast.JoinedStr | ast.Constant)
            assert not bare, f"{module} line {call.lineno}: {ast.unparse(call)}"


def test_what_is_raised_of_pythons_own_errors_has_a_code():
    for module, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func)
                assert name not in PYTHONS or module in WITHOUT, f"{module} line {node.lineno}: {ast.unparse(node)}"


def test_a_message_and_its_code():
    assert coded("HD401", "x: no such file") == "x: no such file [HD401]"
    assert coded("HD402", "x: no such file [HD401]") == "x: no such file [HD401]", "the cause's code stays"
    assert codes("a [HD401]; b [HD204] [HD401] [HD1] [hd204]") == ["HD401", "HD204"]
    assert coded("HD402", "x[HD401].h5: y") == "x[HD401].h5: y [HD402]", "a name is no code"
    assert (hint("a"), hint("a [HD401]")) == (None, "python -m hpcdist explain HD401")
    assert with_hint("a [HD401]") == "a [HD401]\npython -m hpcdist explain HD401"
    assert with_hint("a") == "a"
    assert described(ZeroDivisionError("b"), "HD309") == "ZeroDivisionError: b [HD309]"
    assert described(FileError("HD401", "b"), "HD309") == "b [HD401]"
    assert reason(FileError("HD401", "b" * 400)) == "b" * 400 + " [HD401]", "never cut"


def test_exceptions_show_how_to_read_more():
    """As a note, which is no part of the message; once, also after a pickle has brought it to another process."""
    note = "python -m hpcdist explain HD401"
    for error in (FileError("HD401", "x"), refusal(ValueError, "HD401", "x"), RankError("load", {1: "x [HD401]"})):
        for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert str(same) == str(error) and str(same).endswith("x [HD401]")
            assert same.__notes__ == [note]
            assert traceback.format_exception(same)[-1] == f"{note}\n"
    several = RankError("load", {0: "x [HD401]", 1: "y [HD204]; z [HD401]"})
    assert several.codes == ["HD401", "HD204"]
    assert several.__notes__ == ["python -m hpcdist explain HD401 HD204"]
    many = RankError("load", {rank: f"x [HD{401 + rank}]" for rank in range(19)})
    assert many.codes == [f"HD{401 + rank}" for rank in range(19)] and "HD419" not in str(many)
    assert without_hint(several) is several and several.__notes__ == []
    assert HpcdistError("a message of somebody else").codes == []
    assert not hasattr(HpcdistError("a message of somebody else"), "__notes__")


def test_the_command_prints_pages(capsys):
    assert explain.main(["HD204", "[hd401]", "HD204"]) == 0
    out = capsys.readouterr().out
    assert out == f"{explain.page('HD204')}\n{explain.page('HD401')}"
    assert explain.main([]) == 0
    out = capsys.readouterr().out
    for group, what in explain.GROUPS.items():
        assert f"{group}xx: {what}\n" in out
    for code, title in explain.titles().items():
        assert f"  {code}  {title}\n" in out


@pytest.mark.parametrize("code", ["HD999", "gather", "HD204\n", "../HD204", "-"])
def test_an_unknown_code_is_an_error(code, capsys):
    assert explain.main(["HD401", code]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hpcdist explain: error: ") and err.count("\n") == 1 + code.count("\n")


def _explain(*words, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "hpcdist", "explain", *words],
        input=stdin, capture_output=True, text=True, timeout=300, cwd=ROOT.parent,
    )  # fmt: skip


def test_a_log_is_searched_for_codes(tmp_path):
    log = "step 1\n[1,0]<stderr>:  rank 1: dim is 5 [HD204]\nrank 0: dim is 5 [HD204]; x [HD401]\n\xff [HD999]\n"
    done = _explain("-", stdin=log)
    first, second, third = done.stdout.split("\n> ")
    assert first == f"> [1,0]<stderr>:  rank 1: dim is 5 [HD204]\n\n{explain.page('HD204')}"
    assert second == f"rank 0: dim is 5 [HD204]; x [HD401]\n\n{explain.page('HD401')}"
    assert third.endswith("HD999 is not a code of this hpcdist\n")
    assert (done.returncode, done.stderr) == (0, "")
    done = _explain("-", stdin="all is well\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no error code" in done.stderr


def test_it_needs_neither_torch_nor_mpi(tmp_path):
    """A broken environment is what some of the errors are about. Also into a pipe that is closed."""
    for name in ("torch", "numpy", "mpi4py", "h5py"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken')")
    for pipe in ("", " | head -1"):
        code = f"PYTHONPATH={tmp_path}:'{ROOT.parent}' '{sys.executable}' -m hpcdist explain HD102{pipe}"
        done = run(["bash", "-c", code])
        assert (done.status, done.err) == (0, ""), done
        assert done.out.startswith("# HD102: ")
