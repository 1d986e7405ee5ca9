#!/usr/bin/env bash
# Trains on all GPUs of this host: scripts/launch/gpu_host.sh --config configs/F.py [--set a.b=value ...]
# One process drives all GPUs. That is the default everywhere: there is nothing to rendezvous, one data loader,
# and kernels that write to a peer's memory need all devices in one process. CUDA_VISIBLE_DEVICES picks fewer.
set -euo pipefail
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exec "${PYTHON:-python}" -m jaxthru.train "$@"
