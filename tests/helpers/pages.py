"""The examples in Markdown pages, and what they did: each page in a folder of its own, few jobs for all pages.

What a page can hold, in its order:

- A block ``python`` that begins with ``# name.py`` is a program: it is written into the folder.
- A block ``console`` runs its lines ``$ mpirun -n N python ...``, or ``srun``, or ``python ...`` without a launcher. If
  lines of output follow, they are compared; ``...`` stands for anything. Other lines that begin with ``$`` must be of
  ``NOT_RUN``. ``<!-- fails -->`` above the block: each line of it is a job of its own, and must fail.
- Any other block ``python`` runs after those before it, in one namespace, which has hd, torch, staging, rank and size.
  ``<!-- N ranks`` begins a new namespace on N ranks; what follows up to ``-->`` is Python that the reader does not see,
  and so is that of ``<!-- then``, such as assertions.
- After a block ``console``, a namespace has ended.
- ``<!-- without the tests: reason -->`` leaves the next block alone.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from launch import mpirun, run as run_command, together

# What console blocks may show besides Python programs.
NOT_RUN = re.compile(
    r"(pip|module|make|sbatch|salloc|scancel|squeue|kill|export|git|apt-get|CC=mpicc|bash|ranks|cd|python -m venv|"
    r"python -m pip|conda|apptainer)\b|\. "
)
ASKED_LATER = {"HPCDIST_TRACE"}  # variables that a program asks for when it runs, not when Python or MPI starts
SHELL = re.compile(r"(mkdir|ls|cat|cp|rm|mv) ")  # what they show, as it is
_BLOCK = re.compile(
    r"^<!-- (?P<hidden>\d+ ranks|then|fails|without the tests)(?P<text>.*?)-->$"
    r"|^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LAUNCH = re.compile(r"(?:(?:mpirun|mpiexec|srun)(?P<options>(?: -\S+(?: \d+)?)*) )?python(?P<words> .*)")


@dataclass
class Run:
    """One thing to run.

    Attributes:
        page, line: where it is.
        np: number of ranks; 0 for a process without a launcher.
        words: arguments of Python; empty for code.
        shell: a command of SHELL.
        code: a snippet, with as many lines before it as in the page.
        fresh: whether it begins a new namespace.
        fails: whether it must fail.
        alone: whether it needs a job of its own.
        env: its variables.
        expected: output that the page shows; "" if it shows none.
    """

    page: str
    line: int
    np: int
    words: list[str] = field(default_factory=list)
    shell: str = ""
    code: str = ""
    fresh: bool = False
    fails: bool = False
    alone: bool = False
    env: dict[str, str] = field(default_factory=dict)
    expected: str = ""


@dataclass
class Page:
    """`programs`: name -> text. `runs`: in the order of the page."""

    name: str
    programs: dict[str, str]
    runs: list[Run]


def parse(name, text):
    """Read a page.

    Raises:
        ValueError: something in it would not be run, and does not say why.
    """
    page, np, mark, left = Page(name, {}, []), None, "", ""
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        kind, hidden = found["kind"], found["hidden"] or ""
        if hidden in ("fails", "without the tests"):
            mark = hidden
            continue
        if mark == "without the tests":
            mark, left = "", left + (found["code"] or "")
            continue
        if hidden or kind == "python":
            code = found["text"] if hidden else found["code"]
            program = None if hidden else re.match(r"# (\S+\.py)\n", code)
            if program is not None:
                page.programs[program[1]] = code
                continue
            if hidden.endswith("ranks"):
                np = int(hidden.split()[0])
                np = 0 if np == 1 else np  # the same without a launcher: fewer jobs
            if np is None:
                raise ValueError(f"{name}:{line}: a snippet, and no <!-- N ranks --> above it")
            above = "\n" * (line - (1 if hidden else 0))
            page.runs.append(Run(name, line, np, code=above + code, fresh=hidden.endswith("ranks")))
        elif kind == "console":
            page.runs += _console(name, line, found["code"], mark)
            np = None  # what comes next may be in another job
        mark = ""
    unused = set(page.programs) - {word for run in page.runs for word in run.words} - set(left.split())
    if unused:
        raise ValueError(f"{name}: nothing runs {', '.join(sorted(unused))}")
    return page


def _console(page, line, block, mark):
    """Return what a block ``console`` runs."""
    runs = []
    current = None
    for i, text in enumerate(re.sub(r"\\\n +", lambda found: " ", block).splitlines(), line + 1):
        if text.startswith("$ "):
            current = _command(page, i, text.removeprefix("$ "), mark)
            if current is not None:
                runs.append(current)
        elif current is not None:
            current.expected += text + "\n"
    return runs


def _command(page, line, text, mark):
    """Return what a line runs; None if it is not for the tests.

    Raises:
        ValueError: it is neither.
    """
    words = re.sub(r" +# .*", "", text)
    env = dict(re.findall(r"(\b[A-Z][A-Z_0-9]*)=(\S+) ", re.match(r"(?:[A-Z_0-9]+=\S+ )*", words)[0]))
    found = _LAUNCH.fullmatch(re.sub(r"^(?:[A-Z_0-9]+=\S+ )*", "", words))
    if NOT_RUN.match(words):
        return None
    if SHELL.match(words):
        return Run(page, line, 0, shell=words, alone=True)
    if found is None:
        raise ValueError(f"{page}:{line}: neither a Python program nor in NOT_RUN: {text}")
    number = re.search(r" -n (\d+)", found["options"] or "")
    np = int(number[1]) if number else 1 if found["options"] else 0
    alone = bool(mark or env.keys() - ASKED_LATER or re.search(r"hpcdist[. ](run|doctor)\b", words))
    words = shlex.split(found["words"])
    if not alone:
        words = [*(f"{name}={value}" for name, value in env.items()), *words]
    return Run(page, line, np, words, fails=mark == "fails", alone=alone, env=env)


def execute(pages, folder):
    """Run what the pages hold, below `folder`; return what was wrong: name of the page -> problems.

    Each job takes from every page the next runs on its number of ranks, so that there are few jobs.
    """
    wrong = {page.name: [] for page in pages}
    left = {page.name: list(page.runs) for page in pages}
    for page in pages:
        (folder / page.name).mkdir(parents=True)
        for name, text in page.programs.items():
            (folder / page.name / name).write_text(text)
    while any(left.values()):
        heads = [runs[0] for runs in left.values() if runs]
        alone = [run for run in heads if run.alone]
        if alone:
            run = left[alone[0].page].pop(0)
            here = folder / run.page
            if run.shell:
                job = run_command(["sh", "-c", run.shell], here)
            else:
                quick = "HPCDIST_TIMEOUT" in run.env  # in which a busy machine could not import torch
                job = mpirun(run.np, *run.words, cwd=here, env=run.env, quick=quick)
            wrong[run.page] += _judge(run, job)
            continue
        ready = [run.np for run in heads]
        np = max((_changes(runs), ready.count(runs[0].np), runs[0].np) for runs in left.values() if runs)[2]
        batch = []
        for runs in left.values():
            while runs and runs[0].np == np and not runs[0].alone:
                batch.append(runs.pop(0))
        done = together(np, [{**asdict(run), "cwd": str(folder / run.page)} for run in batch], folder)
        for run, job in zip(batch, done, strict=False):
            wrong[run.page] += _judge(run, job)
        if len(done) < len(batch):  # the last one has ended the job: the rest of its page cannot run, other pages can
            left[batch[len(done) - 1].page] = []
            again = [run for run in batch[len(done) :] if run.page != batch[len(done) - 1].page]
            for name in {run.page for run in again}:
                left[name] = [run for run in again if run.page == name] + left[name]
    return wrong


def _changes(runs):
    """Return how often the number of ranks changes from here on."""
    return sum(a.np != b.np for a, b in pairwise(runs))


def _judge(run, job):
    """Return what is wrong with how a run ended."""
    where = f"{run.page}:{run.line}: {run.shell or ' '.join(run.words)}"
    if bool(job.status) != run.fails:
        return [f"{where}: status {job.status}\n{job.out}\n{job.err}"]
    printed = job.out + job.err if run.fails else job.out
    if run.expected and not matches(run.expected, printed):
        return [f"{where} printed\n{printed}\nnot\n{run.expected}"]
    return []


def matches(expected, printed):
    """Whether a text is the expected one, in which "..." stands for anything."""
    parts = [re.escape(part) for part in _stripped(expected).split("...")]
    return re.fullmatch(".*".join(parts), _stripped(printed), re.DOTALL) is not None


def _stripped(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
