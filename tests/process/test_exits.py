"""What ends a process ends the job, with its status; threads, handlers, prompts and what is kept do not."""

import shlex
import textwrap

import pytest
from launch import finished, launcher, mpirun, python, run

HARMLESS = """
    import _thread, asyncio, atexit, code, contextlib, os, signal, sys, threading, time, weakref
    from concurrent.futures import ThreadPoolExecutor
    import torch
    import hpcdist as hd

    world = hd.init()
    kept = []
    def leave(): sys.exit(3)
    def keep():
        try: leave()
        except SystemExit as error: kept.append(error); raise
    def fail(): raise ValueError("in a thread")
    def swallow():
        try: leave()
        finally: return 1
    def generator():
        try: yield
        finally: leave()
    async def main(): leave()
    class Leaves:
        def __del__(self): leave()

    if world.rank == 1:
        for step in (leave, keep, fail, lambda: exit(3)):
            thread = threading.Thread(target=step); thread.start(); thread.join()
        _thread.start_new_thread(leave, ()); _thread.start_new_thread(fail, ()); time.sleep(0.3)
        late = threading.Timer(0.1, leave); late.start()
        with ThreadPoolExecutor(1) as pool:
            assert isinstance(pool.submit(leave).exception(), SystemExit)
        swallow()
        with contextlib.suppress(SystemExit): leave()
        with contextlib.suppress(SystemExit): asyncio.run(main())
        begun = generator(); next(begun); del begun
        Leaves()
        some = type("Some", (), {})(); reference = weakref.ref(some, lambda _: leave()); del some
        threading.excepthook = lambda args: sys.excepthook(*args[:3])
        thread = threading.Thread(target=fail); thread.start(); thread.join()
        sys.excepthook(ValueError, ValueError("shown"), None)
        atexit.register(leave); atexit.register(fail)
        late = threading.Timer(0.5, leave); late.start()
    for code in (1, "text", None):
        try: sys.exit(code)
        except SystemExit as error: assert error.code == code; kept.append(error)
    assert hd.concat(torch.tensor([world.rank])).tolist() == [0, 1, 2]
    with contextlib.suppress(SystemExit), world: raise SystemExit(9)
    os.write(1, b"survived\\n")
    if world.rank == 1: raise SystemExit(0)
    for _ in range(3):  # the others may go on without a rank that has ended
        try: hd.concat(torch.ones(3))
        except hd.RankError: pass
    if world.rank: sys.exit()
"""


@pytest.mark.both
def test_what_does_not_end_a_process_does_not_end_the_job():
    job = finished(3, code=HARMLESS)
    assert job.out.count("survived") == 3
    assert "ValueError: shown" in job.err
    assert "Exception in thread" in job.err  # of those that fail, and of none that leaves
    assert "\nSystemExit: 3\n" in job.err  # Python names an exit that it ignores as it would without us


@pytest.mark.parametrize("way", ["runpy", "hook"])
def test_a_program_that_another_one_runs(way, tmp_path):
    """As test runners and profilers do."""
    program = tmp_path / "program.py"
    program.write_text(
        "import hpcdist as hd\nworld = hd.init()\nif world.rank == 1: raise ValueError('mine')\nworld.comm.Barrier()\n"
    )
    run_it = f"exec(compile(open({str(program)!r}).read(), 'program.py', 'exec'), {{'__name__': '__main__'}})"
    if way == "runpy":
        run_it = f"runpy.run_path({str(program)!r}, run_name='__main__')"
    if way == "hook":  # as coverage does it
        run_it = f"\n    try: {run_it}\n    except ValueError: sys.excepthook(*sys.exc_info()); sys.exit(4)"
    job = mpirun(2, code=f"import runpy, sys\ndef main():\n    {run_it}\n    return 0\nraise SystemExit(main())")
    assert job.status == {"hook": 4, "runpy": 1}[way], job.err
    assert "ValueError: mine" in job.err


def typed(tmp_path, words, lines):
    """A job of two ranks, each with these lines for its standard input."""
    said = tmp_path / "lines"
    said.write_text(textwrap.dedent(lines))
    return run([*launcher(2), "sh", "-c", f"{shlex.join(python())} {words} < {shlex.quote(str(said))}"])


PROGRAM = "import sys, torch, code, hpcdist as hd\nworld = hd.init()\n"


@pytest.mark.parametrize(
    ("words", "program", "lines", "status"),
    [
        (
            *("-i", "if world.rank: sys.exit(2)\nraise ValueError"),
            *("1/0\n)(\nprint('alive')\nif world.rank == 1: exit(3)\n\nhd.concat(torch.ones(1))", 3),
        ),
        (
            *("", "code.interact(local=globals())\nif world.rank == 1: raise ValueError\nhd.concat(torch.ones(1))"),
            *("1/0\nprint('alive')\n", 1),
        ),
    ],
)
def test_an_error_at_a_prompt_does_not_end_the_job(words, program, lines, status, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + program)
    job = typed(tmp_path, f"{words} {shlex.quote(str(path))}", lines)
    assert job.status == status, job.err
    assert job.out.count("alive") == 2


def test_a_program_on_standard_input_is_no_prompt(tmp_path):
    job = typed(tmp_path, "-", PROGRAM + "if world.rank == 1: 1/0\nhd.concat(torch.ones(1))\n")
    assert job.status == 1
    assert "ZeroDivisionError" in job.err
    assert "reached the end of its program" not in job.err


def test_nothing_keeps_a_job_from_ending():
    """Not the search for who is gone, nor what tells the others; nor a hook that fails."""
    code = """
    import sys, hpcdist as hd
    from hpcdist.process import abort
    world = hd.init()
    def fail(*_): raise KeyError("on the way to the end")
    if world.rank == 1:
        abort.at_end(fail, fail)
        abort.cleanup = fail
        hd.abort = sys.modules["hpcdist.process.abort"]
        hd.abort._last_hook = fail
        raise ValueError("connection reset")
    world.comm.Barrier()
    """
    job = mpirun(2, code=code)
    assert job.status == 1
    assert "ValueError: connection reset" in job.err
    assert "KeyError: 'on the way to the end'" in job.err
