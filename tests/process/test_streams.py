"""Standard streams that nobody reads, or that are closed: nothing crashes or hangs, and no exit status is lost."""

import shlex
import signal
import sys

import pytest
import torch
from launch import finished, limit, mpirun, python, run

import hpcdist

LOST = {  # what a shell makes of standard output and error
    "ls": ("2>&1 | true", "> /dev/full"),
    "doctor": ("2>&1 | true", ">&-"),
    "jobscript": ("| true", ">&-", "2>&- > /dev/null", "> /dev/full"),
}


@pytest.mark.parametrize("command", LOST)
def test_a_command_goes_on_when_nobody_reads_it(command, tmp_path):
    """A reader that has gone, closed streams: as if it were read. A full disk is told, and is a failure."""
    words = {"jobscript": "--nodes 2 -- python x.py"}.get(command, "")
    if command == "ls":
        words = f"{tmp_path / 'x.h5'}"
        with hpcdist.init():
            hpcdist.staging.save(tmp_path / "x.h5", {f"x{i}": torch.ones(1) for i in range(2000)})
    start = f"{shlex.join(python())} -m hpcdist {command} {words}"
    pipes = [(to.partition("|")[0], "| true" if "|" in to else "") for to in LOST[command]]
    script = [f"{{ {start} {to}; echo $? >&3; }} {then}" for to, then in pipes]
    job = run(["bash", "-c", "\n".join(["exec 3>&1", *script])])
    full = "> /dev/full" in LOST[command]
    assert job.out.split() == ["0"] * (len(script) - full) + ["1"] * full, job.err
    assert job.err == f"hpcdist {command}: error: standard output: No space left on device [HD410]\n" * full


COMMANDS = ("", ".concat", " doctor", " explain", ".gather", " jobscript", " ls", ".split", " stage-env")


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_among_the_imports_prints_nothing(command, tmp_path):
    """Each command imports argparse, which sends the signal here. Where the signal is ignored, the command goes on."""
    (tmp_path / "argparse.py").write_text(
        "import os\nos.kill(os.getpid(), 2)\nprint('goes on', flush=True)\nos._exit(0)\n"
    )
    line = f"PYTHONPATH={tmp_path}:$PYTHONPATH '{sys.executable}' -m hpcdist{command}"
    ended, ignored = run(["bash", "-c", line]), run(["bash", "-c", f"trap '' INT; {line}"])
    assert (ended.out, ended.err) == ("", "")
    assert ended.status in (130, -signal.SIGINT)  # -2: bash has become Python
    assert (ignored.out, ignored.status) == ("goes on\n", 0)


def test_ctrl_c_later_ends_a_command_with_130():
    """Alone and on two ranks, where the launcher has words of its own."""
    code = """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as it is among the imports
        from hpcdist.process import abort, streams
        with streams.printing("x"):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                print("cleaned")
    """
    alone, two = mpirun(0, code=code), mpirun(2, code=code)
    assert (alone.status, alone.out, alone.err) == (130, "cleaned\n", "")
    assert two.status == 130
    assert "Traceback" not in two.err


def test_what_cannot_be_encoded_is_an_error():
    """It is not lost with status 0."""
    code = "from hpcdist.process import streams\nwith streams.printing('x'): print('a\\udcff'); print('b')"
    job = mpirun(0, code=code)
    assert (job.status, job.out) == (1, ""), job
    assert job.err.startswith("x: error: standard output: 'utf-8' codec can't encode") and "[HD410]" in job.err, job.err


JOB = """
    import os, sys
    import torch
    import hpcdist as hd

    {early}
    world = hd.init()
    for fd in (0, 1, 2): os.fstat(fd)  # no file or socket of anybody's has such a number
    {late}
    x = torch.ones(2)
    try: hd.concat(x if world.rank else torch.ones(2, 3))
    except hd.RankError: pass
    assert hd.concat(x).tolist() == [1] * 4
    {end}
    hd.concat(x)
"""
CLOSED = {  # what is closed before init() and after it, how the job ends, its status, and what is said
    "none": (
        "",
        "if world.rank: sys.stdout.close(); sys.stderr.close()\n    else: sys.stdout = sys.stderr = None",
        "if world.rank: raise ValueError('mine')",
        *(1, "ValueError: mine"),
    ),
    "odd": (
        *("", "sys.stderr = type('Odd', (), {'write': lambda *_: 1 / 0})()", "if world.rank: hd.recv(0)"),
        *(1, "HangError: recv() at"),
    ),
    "descriptors": ("[os.close(fd) for fd in (0, 1, 2)]", "", "if world.rank: sys.exit(3)", 3, ""),
}


@pytest.mark.parametrize("closed", CLOSED)
def test_a_job_without_standard_streams_ends_with_its_status(closed):
    """The reason has a way out still, unless the descriptors themselves are closed."""
    early, late, end, status, said = CLOSED[closed]
    code = JOB.format(early=early, late=late, end=end)
    job = mpirun(2, code=code, env=limit(2))
    assert job.status == status and said in job.err, job


def test_many_threads_ask_who_is_gone_while_the_watch_ends():
    """And after it has ended: none of them fails, or waits for an answer that does not come."""
    code = """
        import threading, time
        import hpcdist as hd
        failed = []
        threading.excepthook = lambda args: failed.append(args.exc_value)
        for _ in range(20):
            world = hd.init()
            watch = world._stop._watch
            watch._ask_in_turn = lambda *_: time.sleep(0.001)
            def ask():
                for _ in range(20): watch.explain()
            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads: thread.start()
            world.finalize()
            for thread in threads: thread.join(4)
            assert not any(thread.is_alive() for thread in threads)
            watch.explain()
        assert not failed, failed
    """
    finished(0, code=code)
