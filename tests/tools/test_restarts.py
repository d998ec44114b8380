"""The supervisor of a job that goes on, with stand-ins for srun and what else Slurm has. On Slurm: tests/cluster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdist.tools import restarts

# It notes where it starts the ranks. A test of a node fails if the file dead names it.
SRUN = """#!/bin/sh
for word in "$@"; do
    case $word in --nodelist=*) nodes=${word#*=} ;; test) probe=1 ;; esac
done
if [ "$probe" ]; then
    echo "$nodes" >>tested
    case "$*" in *" -n $(echo "$nodes" | tr , '\\n' | wc -l) test -d "*) ;; *) exit 1 ;; esac
    for node in $(echo "$nodes" | tr , ' '); do ! grep -qx "$node" dead || exit 1; done
    exec test -d "$(echo "$@" | sed 's/.* //')"
fi
echo "$TORCHELASTIC_RESTART_COUNT $nodes" >>started
count=$TORCHELASTIC_RESTART_COUNT
fact() { echo "{\\"job\\": \\"${JOB:-7}\\", \\"rank\\": $1, \\"host\\": \\"$2\\", $3}" >"$HPCDIST_FACTS/rank-$1.json"; }
. ./ranks
"""
LOST = """fact 0 node1 '"lost": {"2": "node2.cluster"}, "error": "HangError: x", "place": "train.py:3"'"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the supervisor on node1 to node3; what the ranks do is a script. Its status, output, and where it started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(restarts, "_LOOK", 0.02)
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in signals}

    def run(ranks, *options, dead="", tools=(), launch=("srun", "train"), hosts="node1,node2,node3"):
        for name, text in {"srun": SRUN, "squeue": "echo 10:00", "scancel": "", **dict(tools)}.items():
            Path(name).write_text(text if text.startswith("#") else f"#!/bin/sh\n{text}\n")
            Path(name).chmod(0o755)
        for name, text in {"ranks": ranks, "dead": dead, "started": ""}.items():
            Path(name).write_text(text)
        words = ["--job=7", f"--hosts={hosts}", "--nodes=2", "--restarts=2", "--checkpoint=model", *options]
        status = restarts.main([*words, "--", *launch])
        return status, capsys.readouterr().out, Path("started").read_text().splitlines()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("status", [0, 75])
def test_a_program_that_ends_well_or_stops_in_time_starts_once(status, run):
    assert run(f"exit {status}") == (status, "", ["0 node1,node2"])
    assert not list(Path().glob("hpcdist-*"))


def test_a_host_that_a_hang_blames_is_replaced(run):
    status, out, started = run(f"[ $count = 1 ] || {{ {LOST}; touch model; exit 1; }}")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node3"]), out
    assert "rank 2 on node2.cluster was dead, stopped, or silent\n" in out
    assert "restart 1 of 2 on node1, node3, from model\n" in out


def test_a_blamed_host_that_answers_is_better_than_none(run):
    status, out, started = run(f"[ $count = 1 ] || {{ {LOST}; exit 1; }}", hosts="node1,node2")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node2"]), out


def test_a_silent_host_is_left_out_and_not_believed(run):
    """It sees the other hosts as lost."""
    ranks = 'fact 2 node2 \'"lost": {"0": "node1"}\'; echo node2 >dead; exit 1'
    status, out, started = run(f"[ $count = 1 ] || {{ {ranks}; }}")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node3"]), out
    assert "left out: node2 (no answer, or " in out


SAID = [
    ("srun: error: node2: task 2: Killed\nsrun: error: node1: tasks 0-1: Terminated", "node3"),
    ("slurmstepd: x\nsrun: error: node2: tasks 2-3: Out Of Memory", "node3"),
    ("mpirun noticed that process rank 2 with PID 0 on node node2 exited on signal 9 (Killed).", "node3"),
    ("node2-hsn0.hsn.cm.cluster: shepherd died from signal 9\nnode1.cluster: rank 1 died from signal 15", "node3"),
    ("srun: error: node2: task 2: Killed\nsrun: error: node1: task 0: Exited with exit code 1", "node2"),
    ("prterun noticed that process rank 2 with PID 3 on node node2 exited on signal 11 (Segmentation fault).", "node2"),
    ("srun: error: node[1-2]: tasks 0-3: Killed", "node2"),
]


@pytest.mark.parametrize(("said", "second"), SAID)
def test_the_node_of_a_killed_rank_is_replaced(said, second, run):
    """It is named by the launcher, which ends the ranks that would tell."""
    status, out, started = run(f"[ $count = 1 ] || {{ echo '{said}' >&2; sleep 0.1; echo more >&2; exit 137; }}")
    assert (status, started) == (0, ["0 node1,node2", f"1 node1,{second}"]), out
    assert ("a rank on node2" in out) == (second == "node3"), out


def test_a_launcher_that_kills_the_others_blames_nobody(run):
    """If a rank has told why it ended, srun may print first which ranks it has killed then."""
    ranks = f"echo srun: error: node1: tasks 0-1: Killed >&2; {MISTAKE}"
    status, out, started = run(f"[ $count = 1 ] || {{ {ranks}; }}")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node2"]), out


@pytest.mark.parametrize("hosts", [3, 2])
def test_a_blamed_host_that_is_slow_is_not_waited_for(hosts, run, monkeypatch):
    """If there are enough others; else it has the whole time."""
    monkeypatch.setattr(restarts, "_SOON", 0.5)
    srun = SRUN.replace("exec test", "case $nodes in node2) [ ! -s started ] || sleep 2 ;; esac; exec test")
    names = ",".join(f"node{i + 1}" for i in range(hosts))
    status, out, started = run(f"[ $count = 1 ] || {{ {LOST}; exit 1; }}", tools={"srun": srun}, hosts=names)
    assert (status, started) == (0, ["0 node1,node2", f"1 node1,node{hosts}"]), out
    assert ("left out: node2" in out) == (hosts == 3), out


@pytest.mark.parametrize("full", [False, True])
def test_what_the_ranks_print_arrives(full, tmp_path):
    """All of it, also long lines of any bytes, and a process that stays behind is not waited for, nor a full disk."""
    prints = r"seq 9999 >&2; head -c 300000 /dev/zero >&2; printf ' \377a: shepherd died from signal 9\n' >&2"
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncase $* in *test*) exit;; esac\nsleep 30 >/dev/null & {prints}")
    (tmp_path / "srun").chmod(0o755)
    words = ["--job=7", "--hosts=a", "--nodes=1", "--restarts=0", "--checkpoint=x", "--", "srun", "train"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with open("/dev/full" if full else tmp_path / "err", "wb") as err:
        command = [sys.executable, "-m", "hpcdist", "restarts", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=err, timeout=25, cwd=tmp_path, env=env)
    assert done.returncode == 0, done
    lines = b"".join(b"%d\n" % i for i in range(1, 10000))
    last = bytes(300000) + b" \xffa: shepherd died from signal 9\n"
    assert full or (tmp_path / "err").read_bytes() == lines + last


def test_a_folder_is_not_listed_for_every_line_that_ranks_print(run, monkeypatch):
    monkeypatch.setattr(restarts, "_LOOK", 0.5)
    listed, glob = [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda *args: listed.append(args) or glob(*args))
    assert run("for i in $(seq 300); do echo $i >&2; sleep 0.002; done; exit 0")[0] == 0
    assert len(listed) < 50


def test_many_nodes_are_tested_in_groups(run):
    hosts = [f"node{i}" for i in range(130)]
    status, out, started = run("exit 0", hosts=",".join(hosts), dead="node5\n")
    assert (status, started) == (0, ["0 node0,node1"]) and "left out: node5 (no answer" in out, out
    tested = Path("tested").read_text().splitlines()
    assert sorted(tested[:44]) == sorted(",".join(hosts[at : at + 3]) for at in range(0, 130, 3))
    assert sorted(tested[44:]) == ["node3", "node4", "node5"]


def test_too_few_nodes_or_a_folder_that_is_not_shared(run):
    status, out, started = run("exit 0", dead="node2\nnode3\n")
    assert (status, started) == (1, [])
    assert "left out: node2, node3 (no answer, or " in out and "2 nodes are needed, and 1 are left\n" in out
    with pytest.raises(SystemExit, match="2"):
        run("exit 0", "--checkpoint=no/folder/model")


MISTAKE = """fact 2 node2 '"error": "ValueError: bad step '$count'", "place": "train.py:3", "status": 1'; exit 5"""


def test_the_same_error_twice_at_the_same_step_is_the_programs(run):
    status, out, started = run(MISTAKE)
    assert (status, started) == (5, ["0 node1,node2", "1 node1,node2"]), out
    assert "restart 1 of 2 on node1, node2, from its beginning, unless it saves something else than model\n" in out
    assert "the fault is in the program: the same error twice, and nothing saved between the two\n" in out


@pytest.mark.parametrize("ranks", [f"echo >model.$count; cp model.$count model; {MISTAKE}", f"{MISTAKE} "])
def test_errors_that_differ_are_no_fault_of_the_program(ranks, run):
    """With a checkpoint between them, or at another line; it starts as often as it may."""
    status, out, started = run(ranks if "model" in ranks else ranks.replace("py:3", "py:'$count'"))
    assert (status, len(started)) == (5, 3), out
    assert "fault is in" not in out


def test_an_end_without_facts_is_compared_by_its_status(run):
    status, out, started = run("exit 3")
    assert (status, len(started)) == (3, 2) and "the fault is in the program" in out


def test_facts_of_another_job_are_ignored(run):
    status, out, started = run(f"JOB=8; [ $count = 1 ] || {{ {LOST}; exit 1; }}")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node2"]), out
    assert "rank-0.json is of job 8, and ignored\n" in out


ODD = [
    f'{{"job": "7", "rank": 0, {odd}}}'
    for odd in ('"host": 3', '"host": "node1", "lost": ["node2"]', '"host": "node1", "error": null')
]


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", "{}", "\\377", *ODD])
def test_a_file_without_facts_is_ignored(text, run):
    """A node may have died while it was written."""
    status, out, started = run(f"[ $count = 1 ] || {{ printf '{text}' >$HPCDIST_FACTS/rank-1.json; exit 3; }}")
    assert (status, len(started)) == (0, 2), out
    assert "rank-1.json has no facts, and is ignored\n" in out


def test_an_error_of_any_bytes_is_reported(run):
    error = 'fact 1 node1 \'"error": "OSError: \\\\udcff", "place": "train.py:3"\''
    status, out, started = run(f"[ $count = 1 ] || {{ {error}; exit 3; }}")
    assert (status, len(started)) == (0, 2), out
    assert r"rank 1 on node1: OSError: \udcff, at train.py:3" in out


def test_ranks_that_hang_after_a_failure_are_ended(run, monkeypatch):
    monkeypatch.setattr(restarts, "_END", 0.5)
    squeue = 'case "$*" in *s*-o*%i*) echo "7.batch\n7.3" ;; *) echo 10:00 ;; esac'
    tools = {"squeue": squeue, "scancel": "echo $* >>cancelled"}
    status, out, started = run(f"[ $count = 1 ] || {{ {LOST}; exec sleep 30; }}", tools=tools)
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node3"]), out
    assert set(Path("cancelled").read_text().split()) == {"7.3"}


def test_a_signal_goes_to_the_ranks_and_nothing_starts_again(run):
    status, out, started = run("trap 'exit 9' USR1; kill -USR1 $PPID; while :; do sleep 0.1; done")
    assert (status, started) == (9, ["0 node1,node2"]), out


def test_a_signal_while_nodes_are_tested_starts_nothing(run):
    srun = SRUN.replace("exec test", "{ ! [ -s started ] || kill -TERM $PPID; } && exec test")
    status, out, started = run("exit 3", tools={"srun": srun})
    assert (status, len(started)) == (3, 1) and out.endswith("no start after a signal\n"), out
    assert len(list(Path().glob("hpcdist-*"))) == 1


def test_after_a_signal_no_node_is_waited_for(run):
    srun = SRUN.replace("exec test", "case $nodes in node2) kill -TERM $PPID; exec sleep 30 ;; esac; exec test")
    begun = time.monotonic()
    assert run("exit 0", tools={"srun": srun}) == (1, "hpcdist restarts: no start after a signal\n", [])
    assert time.monotonic() < begun + 20


def test_ranks_that_a_signal_ends_and_a_folder_that_is_gone(run):
    assert run("kill -KILL $$")[0] == 137
    assert run("rm -r $HPCDIST_FACTS")[0] == 0


def test_no_restart_near_the_time_limit(run):
    status, out, started = run("exit 3", tools={"squeue": "echo 0:30"})
    assert (status, len(started)) == (3, 1) and "the job ends in 30 s: no restart\n" in out


def test_under_pbs_mpirun_gets_a_file_of_the_nodes(run):
    launch = ("mpirun", "-n", "4", "--hostfile", "old", "train", "--hostfile", "its own")
    mpirun = (
        "#!/bin/sh\n"
        'case "$*" in *" test -d "*) exec test -d "${7}" ;; esac\n'
        '[ "$7" = "its own" ] && cmp -s "$4" "$PBS_NODEFILE" || exit 9\n'
        "cat $PBS_NODEFILE >>started; exit $((3 - 3 * TORCHELASTIC_RESTART_COUNT))\n"
    )
    tools = {"mpirun": mpirun, "qstat": "exit 1"}
    status, out, started = run("", tools=tools, launch=launch, hosts="a.x,a.x,b.x,b.x,c.x,c.x")
    assert (status, started) == (0, ["a.x", "a.x", "b.x", "b.x"] * 2), out


def test_two_hosts_that_go_silent_are_no_fault_of_the_program(run):
    """Though the others fail at the same line, and nothing was saved."""
    ranks = f"[ $count = 2 ] || {{ {LOST}; echo node$((2 + count)) >>dead; exit 1; }}"
    status, out, started = run(ranks, hosts="node1,node2,node3,node4")
    assert (status, started) == (0, ["0 node1,node2", "1 node1,node3", "2 node1,node4"]), out
