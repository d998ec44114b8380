"""Write job scripts for Slurm, PBS, Flux and LSF. Strings only: no torch, no MPI, no scheduler.

The texts are the templates in templates/. The scripts in jobscripts/ are exactly what :func:`write` returns.
"""

from __future__ import annotations

import shlex
from dataclasses import Field, fields
from typing import Any

import jinja2

from hpcdist.jobscript.shape import OTHER_PMIS, PMI_OF_IMAGES, PMIS, SCHEDULERS, Shape, check, completed, gpus, seconds

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("hpcdist.jobscript"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
    comment_start_string="<#",  # {# begins a length in bash
    comment_end_string="#>",
)


def write(shape: Shape) -> str:
    """Return the job script of a shape. Nothing is read but the templates; nothing is written or started.

    Raises:
        InputError: the shape is impossible: no nodes, more GPUs than ranks, a malformed time limit, an option that the
            scheduler does not have, and so on.

    Example::

        >>> print(write(Shape(kind="gpu", nodes=4, gpus_per_node="8")))
        #!/bin/bash
        # One GPU per rank, NCCL:
        #     sbatch gpu.sbatch 'shards/*.npy'
        ...
    """
    full, scheduler = completed(shape), SCHEDULERS[shape.scheduler]
    check(shape, full)
    values = vars(scheduler) | vars(full)
    for name in ("venv", "conda", "apptainer", "pyxis"):
        values[name] = values[name] and shlex.quote(values[name] + ("/bin/activate" if name == "venv" else ""))
    values |= {
        "gpus": gpus(full),
        "seconds": seconds(full.time),
        "modules": shlex.join(full.modules),
        "quoted_mounts": [shlex.quote(mount) for mount in full.mounts],  # Pyxis takes all in one word with quotes
        "directives": [text.partition("=")[::2] for text in full.directives],
        "command": full.command and shlex.join(full.command),
        "written_by": _written_by(shape),
        "pmis": PMIS,
        "other_pmis": OTHER_PMIS,
        "pmi_of_images": PMI_OF_IMAGES,
    }
    return _TEMPLATES.get_template("plain.j2" if shape.plain else f"kinds/{shape.kind}.j2").render(values)


def option(field: Field[Any]) -> str:
    """Return the option for a field of a shape. That of several values is in the singular, and may be repeated."""
    name = field.name.removesuffix("s") if field.default == () else field.name
    return f"--{name.replace('_', '-')}"


def _written_by(shape: Shape) -> str:
    """Return the command line that writes this script."""
    words = ["python", "-m", "hpcdist.jobscript", "--kind", shape.kind]
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name not in ("kind", "command") and value != field.default:
            for one in value if isinstance(value, tuple) else [value]:
                words += [option(field)] if one is True else [option(field), str(one)]
    return shlex.join([*words, *(["--", *shape.command] if shape.command else [])])
