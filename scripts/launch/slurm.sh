#!/bin/bash
# Trains on the GPUs of a SLURM cluster, and continues in the queue after each time limit.  In the checkout, on a
# file system that all nodes share; --model_dir and the other flags are those of `meshloom train`:
#
#   sbatch --nodes=4 scripts/launch/slurm.sh --model_dir=/shared/runs/mine --gin_file=mine.gin --gin_file=layouts/fsdp.gin
#
# One process on each node takes all of its GPUs.  docs/launching.md explains the exit codes.
#SBATCH --job-name=meshloom
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

meshloom=.venv/bin/meshloom
code=0
# Without --cpu-bind=none, SLURM may bind the one task of a node to one core.
srun --cpu-bind=none "$meshloom" supervise -- "$meshloom" train "$@" || code=$?

case $code in
  143) reason="SIGTERM came, as before the time limit, and all processes saved the same step" ;;
  75) reason="no step ended within Run.stall_minutes, also after restarts" ;;
  *) exit "$code" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-100}" ]; then
  echo "Exit code $code: $reason.  Not queued again: ${MAX_REQUEUES:-100} times are enough."
  exit "$code"
fi
echo "Exit code $code: $reason.  Queues job $SLURM_JOB_ID again."
scontrol requeue "$SLURM_JOB_ID"
