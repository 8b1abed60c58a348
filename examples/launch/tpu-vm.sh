#!/usr/bin/env bash
# TPU=my-pod ZONE=us-east5-a examples/launch/tpu-vm.sh configs/8b.yaml run.dir=/mnt/runs/8b [key=value ...]
# Every host of a TPU VM pod slice runs the same command; jax asks the metadata server who is who. Beforehand, once:
# the same checkout in ~/jaxfb of every host with `pip install -e .[tpu]`, and a file system that all mount (/mnt/runs).
set -euo pipefail
printf -v arguments ' %q' "$@"
gcloud compute tpus tpu-vm ssh "${TPU:?name of the TPU VM}" --zone "${ZONE:?its zone}" --worker=all \
  --command "cd jaxfb && .venv/bin/jaxfb train$arguments --resume"
