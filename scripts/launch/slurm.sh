#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process a node, and goes on by itself after a preemption, a lost node, a hang
# or the time limit:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config configs/F.py --run-dir SHARED/RUN
# The run directory lies on a file system that all nodes see. `--nodes=2-4` takes what there is at each start: the
# batches stay the same. 5 minutes before the time limit Slurm sends SIGTERM: the run saves, ends with exit code 143,
# and the job is queued again. So it is after other ends that a restart can mend, until a step has failed three times.
#SBATCH --job-name=jaxthru
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
set -uo pipefail
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
python=${PYTHON:-python}
# Without this JAX gives each Slurm task one GPU.
if ((${SLURM_GPUS_ON_NODE:-0} > 0)); then
  JAX_LOCAL_DEVICE_IDS="$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))"
  export JAX_LOCAL_DEVICE_IDS
fi
# A process a node is asked for here, and not of sbatch: of a range of nodes that would take the fewest. It has all
# cores. None is killed as the first ends: the others save, or say why they end. They do so within 30 s.
nodes=${SLURM_JOB_NUM_NODES:-1}
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=60 "$python" -m jaxthru.train "$@"
code=$?
if ((code != 0)) && "$python" -m jaxthru.supervise --after "$code" -- "$@"; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
