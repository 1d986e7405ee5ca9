#!/usr/bin/env bash
# Trains on a TPU pod slice; run it on all of its hosts at once, in a checkout of this repository:
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd jaxthru && scripts/launch/tpu_pod.sh --config ...'
# The run directory (--run-dir) is gs://BUCKET/RUN, or lies on a file system that all hosts see. After a crash, a hang or
# a lost process each host starts its process again, and they meet anew; a step that fails three times is given up.
# SIGTERM or Ctrl-C, sent on all hosts, saves and ends the run; sent on one, it ends this there, and the others wait for
# it until they give up. A slice that was deleted has to be made, and this started on it, by whoever made it.
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
python=${PYTHON:-python}
# Those that lose a peer take 30 s to find out and to end: whoever came before them would meet their old coordinator.
exec "$python" -m jaxthru.supervise --pause 60 -- "$python" -m jaxthru.train "$@"
