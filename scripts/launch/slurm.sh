#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process a node:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config configs/F.py --run-dir SHARED/RUN
# The run directory lies on a file system that all nodes see. 5 minutes before the time limit Slurm sends SIGTERM:
# the run saves and ends with exit code 0; submit the same line again to go on.
#SBATCH --job-name=jaxthru
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@300
set -euo pipefail
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
# Without this JAX gives each Slurm task one GPU.
export JAX_LOCAL_DEVICE_IDS="$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))"
exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m jaxthru.train "$@"
