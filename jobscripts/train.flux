#!/bin/bash
# A training with DistributedDataParallel, one GPU per rank:
#     flux batch train.flux --epochs 10
#
# Edit: the #flux: lines (options given to flux batch override them), the lines that load your environment,
# and the program.
# The program is torch's own with one changed line, hpcdist.init(): see docs/do/torch-distributed.md.
# Written by:
#     python -m hpcdist jobscript --kind train --scheduler flux --gpus-per-node 4
#flux: --job-name=hpcdist-train
#flux: --nodes=2
#flux: --nslots=2 # one slot per node
#flux: --cores-per-slot=32
#flux: --gpus-per-slot=4
#flux: --time-limit=600s

set -eo pipefail # not -u: scripts of modules and of conda use unset variables

# module load openmpi
# source env/bin/activate

# The program of each rank. Arguments after the script's name are added to it.
program=(python -m hpcdist.examples.train_ddp)

export OMP_NUM_THREADS=8
job=${FLUX_ENCLOSING_ID:-of no number} nodes=$(flux getattr size) hosts=$(flux getattr hostlist)
per_node=4
ranks=$((nodes * per_node))
mpi=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])')
# The ranks see all GPUs of their node. Open MPI 5 needs -o pmi=pmix, of flux-pmix.
launch=(flux run --nodes="$nodes" --ntasks="$ranks" --cores-per-task="$OMP_NUM_THREADS" --gpus-per-task=1 -o cpu-affinity=off)

echo "train: job $job on $nodes nodes: $hosts"
echo "ranks: $ranks, $per_node on each node, $OMP_NUM_THREADS CPUs each"
echo "MPI: $mpi; launched by: ${launch[*]}"
echo "GPUs of a node: 4"
# Each rank runs on the cores beside its GPU, the one that matches its local rank, as in hpcdist.init().
beside_gpu='local=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$FLUX_TASK_LOCAL_ID}}
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-}"
if [ ${#gpus[@]} -gt 0 ]; then gpu=${gpus[local % ${#gpus[@]}]}; else gpu=$local; fi
bus=$(nvidia-smi --id="$gpu" --query-gpu=pci.bus_id --format=csv,noheader) && bus=${bus,,} &&
    taskset --pid --cpu-list "$(<"/sys/bus/pci/devices/${bus:4}/local_cpulist")" $$ >/dev/null ||
    echo "$(hostname): local rank $local is not bound to the cores beside GPU $gpu" >&2
export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
exec "$@"'
launch+=(bash -c "$beside_gpu" bash)
"${launch[@]}" "${program[@]}" "$@"
