#!/usr/bin/env bash
# A study as a Slurm array: sixteen jobs, each with a card, share a folder that all nodes see. A job that is killed or runs out of time is started again by
# the same command, and loses the trials that were running.
#
#     sbatch studies/slurm.sh studies/w3.toml /shared/w3
#
# When all are done, one process adds up and writes the page (nothing is left to run):
#
#     espalier study studies/w3.toml --out /shared/w3
#SBATCH --job-name=espalier-study
#SBATCH --array=1-16
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -eu
study=$1 folder=$2
srun espalier study "$study" --out "$folder" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
