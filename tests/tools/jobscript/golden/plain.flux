#!/bin/bash
# Written by: python -m hpcdist jobscript --plain --scheduler flux --kind train --conda /envs/torch
#flux: --job-name=hpcdist-train
#flux: --nodes=2
#flux: --nslots=2 # one slot per node
#flux: --cores-per-slot=4
#flux: --time-limit=600s
set -e
# module load openmpi
source "$(conda info --base)/etc/profile.d/conda.sh"
conda activate /envs/torch
export OMP_NUM_THREADS=1
flux run --nodes=2 --ntasks=8 --cores-per-task=1 python train.py
