#!/bin/bash
# Builds an image of this checkout's last commit in Cloud Build, for TPUs (EXTRA=cuda: for GPUs; EXTRA=: for CPUs):
#
#   PROJECT=my-project REGION=us-west4 scripts/launch/image.sh
#
# Prints the name of the image, which is IMAGE for the other scripts here.  `docker build` needs no cloud: see Dockerfile.
set -euo pipefail

: "${PROJECT:?the Google Cloud project}" "${REGION:?of the repository of images, such as us-west4}"
EXTRA=${EXTRA-tpu}
image=$REGION-docker.pkg.dev/$PROJECT/meshloom/meshloom:${EXTRA:-cpu}-$(git rev-parse --short HEAD)

gcloud artifacts repositories describe meshloom --project="$PROJECT" --location="$REGION" > /dev/null 2>&1 \
  || gcloud artifacts repositories create meshloom --project="$PROJECT" --location="$REGION" --repository-format=docker
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive HEAD | tar -x -C "$source"
cat > "$source/cloudbuild.yaml" <<END
steps:
  - name: gcr.io/cloud-builders/docker
    args: [build, --build-arg, EXTRA=$EXTRA, --tag, $image, .]
images: [$image]
options: {diskSizeGb: 100}
timeout: 3600s
END
gcloud builds submit "$source" --project="$PROJECT" --config="$source/cloudbuild.yaml"
echo "IMAGE=$image"
