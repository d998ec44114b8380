"""Ask the scheduler how much time is left of the batch job in which this process runs. Needs no torch.

Sources: sbatch(1) and squeue(1) of Slurm; qstat(1B) of OpenPBS and of Torque; bjobs(1) of LSF, options -o and -WL
("hours:minutes status"); flux-job(1), "TIMELEFT".
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping

from hpcdist.errors import coded, reason, with_hint
from hpcdist.process import abort

_PATIENCE = 10.0  # seconds for a command of a scheduler, which may retry for minutes
_NO_LIMIT = 2**32 - 1  # what Flux prints


def _clock(text: str) -> int:
    """Convert [[days-]hours:][minutes:]seconds."""
    days, _, clock = text.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return total + 86400 * int(days or 0)


def _after_start(text: str) -> float:
    values = dict(re.findall(r"^\s*([\w.]+) = (.*\S)", text, re.MULTILINE))
    start = values.get("stime") or values.get("start_time", "")  # of OpenPBS, of Torque
    return _clock(values.get("Resource_List.walltime", "")) + time.mktime(time.strptime(start)) - time.time()


# Variable with the ID of a job: command that prints the time of the job whose ID follows, and how to read seconds left.
_SCHEDULERS: dict[str, tuple[str, Callable[[str], float]]] = {
    "SLURM_JOB_ID": ("squeue --noheader --format=%L --jobs", _clock),
    "PBS_JOBID": ("qstat -f", _after_start),
    "LSB_BATCH_JID": ("bjobs -noheader -o time_left", lambda text: 60 * _clock(text.partition(" ")[0])),
    "FLUX_JOB_ID": ("flux job timeleft", _clock),
}


def time_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds left of this batch job; of a job within a job, the smaller number.

    None without a job or a limit. If a scheduler cannot tell, the reason is printed.
    """
    found = [_left(job, environ) for job in _SCHEDULERS if environ.get(job)]
    return min((left for left in found if left is not None and left < _NO_LIMIT), default=None)


def _left(job: str, environ: Mapping[str, str]) -> float | None:
    if job == "SLURM_JOB_ID" and (end := environ.get("SLURM_JOB_END_TIME")):  # seconds of the epoch; not in Slurm 22.05
        return int(end) - time.time()
    command, seconds = _SCHEDULERS[job]
    words, text = [*command.split(), environ[job]], ""
    try:
        text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_PATIENCE).stdout.strip()
        return seconds(text)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = f"the time left of this job is not known ({' '.join(words)}: {text or reason(error)})"
        abort.print_error(with_hint(coded("HD114", f"hpcdist: {why}, and stop_before has no effect")))
        return None
