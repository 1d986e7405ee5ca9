#!/usr/bin/env bash
# Trains on a GKE cluster that XPK made, on TPU slices or GPU nodes:
#   scripts/launch/xpk.sh --cluster C --workload NAME --docker-image IMAGE --tpu-type v5litepod-256 --num-slices 2 -- \
#     --config configs/F.py --run-dir /shared/RUN
#   scripts/launch/xpk.sh --cluster C --workload NAME --docker-image IMAGE --device-type h100-80gb-8 --num-nodes 4 -- ...
# Before -- stand XPK's own options (a later one takes the place of ours, so --max-restarts 5 is heard), after it those of
# jaxthru.train. IMAGE holds this repository with its environment; the run directory lies where all hosts see it. XPK
# starts anew on exit codes 42 and 127 to 255 alone, and so not on that of a hang, 70, unless it is told to.
# DRY_RUN=FILE writes the manifest there, and starts nothing.
set -euo pipefail
options=()
while (($# > 0)) && [[ $1 != -- ]]; do
  options+=("$1")
  shift
done
if (($# < 2)) || ((${#options[@]} == 0)); then
  echo "xpk.sh: give XPK's options, then --, then those of jaxthru.train" >&2
  exit 2
fi
shift
dry=()
if [[ -n ${DRY_RUN:-} ]]; then dry=(--dry-run --output-manifest-file "$DRY_RUN"); fi
# On GPU nodes XPK says the same as JAX's variables by others. No double quote and no backslash: XPK writes the command
# into YAML as it is. exec: SIGTERM has to reach the program, and not a shell around it.
# shellcheck disable=SC2016
rendezvous='case ${NNODES:-} in ?*) export JAX_COORDINATOR_ADDRESS=$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT'
rendezvous+=' JAX_NUM_PROCESSES=$NNODES JAX_PROCESS_ID=$NODE_RANK;; esac'
exec xpk workload create --max-restarts 20 --restart-on-exit-codes 70 --termination-grace-period-seconds 300 \
  --env NCCL_NVLS_ENABLE=0 --env NVSHMEM_DISABLE_NVLS=1 --env TORCH_SYMM_MEM_DISABLE_MULTICAST=1 \
  "${dry[@]}" "${options[@]}" --command "$rendezvous; exec python -m jaxthru.train ${*@Q}"
