#!/usr/bin/env bash
# All GPU checks, on a machine with a GPU and an environment that has torch with CUDA, mpi4py, pytest and pytest-mpi:
#   tests/gpu/run.sh [PYTHON] [MPIRUN]
# One rank with NCCL; 2 and 4 ranks, which share the GPUs if there are fewer; the whole suite's CPU part is not run.
# With torch 2.15 and with an earlier one: NCCL's groups are other ones.
# With NCCL 2.30.3 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 runs the ragged NCCL paths with 2 ranks on one GPU.
set -u
cd "$(dirname "$0")/../.."
python=${1:-python} mpirun=${2:-mpirun}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export HPCDIST_TIMEOUT=${HPCDIST_TIMEOUT:-40} # seconds: a hang must not use up the machine
status=0
nccl=$("$python" -c 'from hpcdist.tensors.accelerator import library_version; print(library_version())')
"$python" -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name())'
echo "NCCL $nccl"
for np in 1 2 4; do
    echo "== $np ranks"
    timeout 300 "$mpirun" -n "$np" "$python" -m pytest -q --capture=sys --with-mpi -m "mpi and gpu" tests/gpu || status=1
done
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# Also on fewer ranks than GPUs; with torch 2.15 and later NCCL's groups are bound to a GPU.
for np in $(seq "$gpus"); do
    echo "== worlds one after the other, $np ranks"
    timeout 120 "$mpirun" -n "$np" "$python" tests/gpu/worlds.py || status=1
done
if [ "$(printf '%s\n' 2.30.3 "$nccl" | sort -V | head -1)" = 2.30.3 ]; then
    echo "== 2 ranks on one GPU with NCCL"
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 \
        timeout 300 "$mpirun" -n 2 "$python" -m pytest -q --capture=sys --with-mpi -m "mpi and gpu" tests/gpu || status=1
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 timeout 120 "$mpirun" -n 2 "$python" tests/gpu/worlds.py || status=1
fi
echo "== the examples, $gpus ranks"
folder=$(mktemp -d)
for example in train_ddp train_fsdp; do
    (export PYTHONPATH=$PWD:${PYTHONPATH:-} && cd "$folder" && timeout 120 "$mpirun" -n "$gpus" "$python" -m "hpcdist.examples.$example") || status=1
done
rm -rf "$folder"
echo "== the doctor, $gpus ranks: nothing is to be broken"
timeout 120 "$mpirun" -n "$gpus" "$python" -m hpcdist.doctor || status=1
echo "== hangs, on a GPU's ranks: the deadline names rank 1"
for reason in sleep stop; do
    # The last rank of two that share a GPU, or have one each, does not reach the call: the deadline says so.
    LIMIT=5 BACKEND=$([ "$gpus" -gt 1 ] || echo gloo) timeout 120 "$mpirun" -n 2 "$python" tests/watch/hanging.py "$reason" concat 2>&1 |
        grep -E "rank 1 \(.*(has not reached|is stopped)" || status=1
done
echo "== benchmarks, $gpus ranks: ragged concat of 16 B to 2 GiB, and the copy of a save, within 1.15 of a plain one"
folder=$(mktemp -d)
printf 'concat int64 %s %s\n' 2 1 8192 4096 2097152 1048576 33554432 16777216 268435456 134217728 >"$folder/shapes.txt"
timeout 300 "$mpirun" -n "$gpus" "$python" -m hpcdist.compare --shapes "$folder/shapes.txt" -o "$folder/gpu.json" || status=1
timeout 300 "$mpirun" -n "$gpus" "$python" benchmarks/once.py async_save --device cuda --sizes 1G --folder /dev/shm || status=1
rm -rf "$folder"
exit $status
