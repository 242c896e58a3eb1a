#!/bin/bash
# Trains on a slice of TPU VMs: requests the slice, requests it again after each preemption, and deletes it when the
# training ends.  The flags are those of `meshloom train`:
#
#   NAME=mine ZONE=us-west4-a IMAGE=us-west4-docker.pkg.dev/my-project/meshloom/meshloom:tpu-0123abc \
#     scripts/launch/tpu_vm.sh --model_dir=gs://my-bucket/runs/mine --data_dir=gs://my-bucket/data --gin_file=mine.gin
#
# TYPE, VERSION: the slice and its runtime version.  CAPACITY: --spot, --reserved, or empty for on demand.
# The VMs train without this script: if it stops, start it again to watch the same slice.
set -euo pipefail

: "${NAME:?a name for the slice}" "${ZONE:?such as us-west4-a}" "${IMAGE:?as scripts/launch/image.sh prints it}"
TYPE=${TYPE-v5litepod-64}        # v6e-64 for Trillium
VERSION=${VERSION-v2-alpha-tpuv5-lite}  # v2-alpha-tpuv6e for Trillium
CAPACITY=${CAPACITY---spot}
POLL_S=${POLL_S-60}

model_dir=
for flag in "$@"; do
  case $flag in --model_dir=gs://*) model_dir=${flag#--model_dir=} ;; esac
done
: "${model_dir:?give --model_dir=gs://BUCKET/FOLDER, which all VMs write}"
exit_code=$model_dir/launch_exit_code  # written by scripts/launch/tpu_vm_startup.sh

here=$(dirname "$0")
arguments=$(mktemp)
trap 'rm -f "$arguments"' EXIT
printf '%q ' "$@" > "$arguments"

tpus() {  # VERB FLAG…
  gcloud compute tpus queued-resources "$@" --zone="$ZONE" --quiet
}
state() {
  tpus list --filter="name~/$NAME\$" --format='value(state.state)'
}
create() {
  gcloud storage rm "$exit_code" 2> /dev/null || true  # from an earlier training
  # shellcheck disable=SC2086  # CAPACITY may be empty
  tpus create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" $CAPACITY \
    --scopes=cloud-platform --metadata="image=$IMAGE,exit_code=$exit_code" \
    --metadata-from-file="startup-script=$here/tpu_vm_startup.sh,arguments=$arguments"
}

last=
created=
while true; do
  if ! now=$(state); then  # no answer: try again later
    sleep "$POLL_S"
    continue
  fi
  [ "$now" = "$last" ] || echo "$(date +%T) $NAME: ${now:-not there}"
  last=$now
  [ -z "$now" ] || created=yes
  if [ -n "$now" ] && code=$(gcloud storage cat "$exit_code" 2> /dev/null); then
    until tpus delete "$NAME" --force || { now=$(state) && [ -z "$now" ]; }; do
      sleep "$POLL_S"
    done
    gcloud storage rm "$exit_code" || true
    echo "The training ended with exit code $code.  The slice is deleted."
    exit "$code"
  fi
  case $now in
    "")
      create || [ -n "$created" ]  # a first request that fails ends the script; later ones are repeated
      created=yes
      ;;
    SUSPENDED | FAILED) tpus delete "$NAME" --force || true ;;  # preempted, or no capacity: request again
  esac
  sleep "$POLL_S"
done
