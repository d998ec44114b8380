#!/usr/bin/env bash
# All GPU checks: see run.py beside this file.
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root:$root/tests/helpers:${PYTHONPATH:-}
exec "${PYTHON:-python}" "$root/tests/gpu/run.py" "$@"
