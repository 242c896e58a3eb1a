#!/bin/bash
# Trains on the GPUs of a SLURM cluster, and queues itself again at each time limit.  Run it in the checkout, on a file
# system that all nodes share; --model_dir and the other flags are those of `meshloom train`:
#
#   sbatch --nodes=4 scripts/launch/slurm.sh --model_dir=/shared/runs/mine --gin_file=mine.gin --gin_file=layouts/fsdp.gin
#
# One process per node uses all GPUs of the node.  docs/launching.md explains the exit codes.
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
  143) reason="SIGTERM arrived, as it does before the time limit, and all processes saved the same step" ;;
  75) reason="no step ended within Run.stall_minutes, even after restarts" ;;
  *) exit "$code" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-100}" ]; then
  echo "Exit code $code: $reason.  Not queued again: MAX_REQUEUES is ${MAX_REQUEUES:-100}."
  exit "$code"
fi
echo "Exit code $code: $reason.  Queueing job $SLURM_JOB_ID again."
scontrol requeue "$SLURM_JOB_ID"
