#!/bin/bash
# Trains on a TPU slice in a GKE cluster that `xpk cluster create` made (`pip install xpk`).  The flags are those of
# `meshloom train`:
#
#   NAME=mine CLUSTER=tpus PROJECT=my-project ZONE=us-west4-a IMAGE=us-west4-docker.pkg.dev/my-project/meshloom/meshloom:tpu-0123abc \
#     scripts/launch/gke_xpk.sh --model_dir=gs://my-bucket/runs/mine --data_dir=gs://my-bucket/data --gin_file=mine.gin
#
# XPK restarts the job on the exit codes 42 and 127 to 255, and on the two below: 1, a failure, and 75, a stall.
set -euo pipefail

: "${NAME:?a name for the job}" "${CLUSTER:?of xpk cluster create}" "${PROJECT:?}" "${ZONE:?}" "${IMAGE:?as scripts/launch/image.sh prints it}"
xpk workload create --workload="$NAME" --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --tpu-type="${TYPE-v5litepod-64}" --num-slices="${SLICES-1}" --docker-image="$IMAGE" \
  --max-restarts=100 --restart-on-exit-codes=1,75 --termination-grace-period-seconds=120 \
  --command="exec meshloom supervise -- meshloom train --start_timeout_s=900$(printf ' %q' "$@")"
