#!/usr/bin/env bash
# Trains on a TPU pod slice; run it on all of its hosts at once, in a checkout of this repository:
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd jaxthru && scripts/launch/tpu_pod.sh --config ...'
# The run directory (--run-dir) lies on a file system that all hosts see.
set -euo pipefail
attribute() {
  curl -fsS -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
IFS=, read -ra workers <<<"$(attribute worker-network-endpoints)" # host names, or name:id:address
export JAX_COORDINATOR_ADDRESS="${workers[0]##*:}:8476"
export JAX_NUM_PROCESSES="${#workers[@]}"
JAX_PROCESS_ID="$(attribute agent-worker-number)"
export JAX_PROCESS_ID
exec "${PYTHON:-python}" -m jaxthru.train "$@"
