#!/bin/bash
# CPU ranks over MPI:
#     flux batch cpu.flux 'shards/*.npy'
#
# Edit: the #flux: lines (options given to flux batch override them), the lines that load your environment,
# and the program.
# Written by:
#     python -m hpcdist jobscript --scheduler flux --bind cores --exclusive --queue pbatch --account p1 --constraint 'host:n[1-8]' --output 'out.{{id}}' --directive setattr=system.x=1 --time 90
#flux: --job-name=hpcdist-cpu
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=5400s
#flux: --queue=pbatch
#flux: --bank=p1
#flux: --requires=host:n[1-8]
#flux: --output=out.{{id}}
#flux: --setattr=system.x=1

set -eo pipefail # not -u: scripts of modules and of conda use unset variables

# module load openmpi
# source env/bin/activate

# The program of each rank. Arguments after the script's name are added to it.
program=(python -m hpcdist.gather)

export OMP_NUM_THREADS=1
job=${FLUX_ENCLOSING_ID:-of no number} nodes=$(flux getattr size) hosts=$(flux getattr hostlist)
per_node=4
ranks=$((nodes * per_node))
mpi=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])')
# The ranks see all GPUs of their node. Open MPI 5 needs -o pmi=pmix, of flux-pmix.
launch=(flux run --nodes="$nodes" --ntasks="$ranks" --cores-per-task="$OMP_NUM_THREADS" -o cpu-affinity=per-task)

echo "cpu: job $job on $nodes nodes: $hosts"
echo "ranks: $ranks, $per_node on each node, $OMP_NUM_THREADS CPUs each"
echo "MPI: $mpi; launched by: ${launch[*]}"
"${launch[@]}" "${program[@]}" "$@"
