#!/bin/bash
# Each VM of scripts/launch/tpu_vm.sh runs this when it starts, also after a reboot.  It trains in a container and writes
# the exit code to the bucket, where tpu_vm.sh reads it.
set -uo pipefail

metadata() {
  curl --silent --fail --retry 5 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
image=$(metadata image)
quoted=$(metadata arguments)  # quoted by tpu_vm.sh
declare -a arguments="($quoted)"

gcloud auth configure-docker "${image%%/*}" --quiet
until docker pull --quiet "$image"; do sleep 10; done
docker rm --force meshloom 2> /dev/null  # left over from before a reboot

# TPUs need --privileged, and the VMs reach each other through --network=host.  --stop-timeout leaves time to save.
code=0
docker run --name=meshloom --privileged --network=host --stop-timeout=25 --log-opt=max-size=100m \
  --volume=/var/cache/meshloom:/root/.cache/meshloom "$image" \
  supervise -- meshloom train --start_timeout_s=900 "${arguments[@]}" || code=$?

# Only the end of the training counts, not the end of a VM (129, 137, 143).  One VM of the slice writes the exit code.
if [ "$(metadata agent-worker-number)" = 0 ]; then
  case $code in
    0 | 1 | 2 | 75) echo "$code" | gcloud storage cp - "$(metadata exit_code)" ;;
  esac
fi
