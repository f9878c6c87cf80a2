#!/usr/bin/env bash
# One node's share of scripts/slurm/train.sh, which starts it with srun once on each node.
#
#   MASTER_ADDR, MASTER_PORT   where the first node is reached (set by train.sh)
#   JUDGE_GPUS                 GPUs that the training leaves to the judge on the first node (set by
#                              train.sh)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../../tools/python.sh"
show_help "$0" "$@"

export NNODES="${SLURM_NNODES:?start this with scripts/slurm/train.sh}"
export NODE_RANK="$SLURM_NODEID"
if ((NODE_RANK == 0)); then
  gpus="${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}"
  # All lines but the judge's; grep ends with 1 if there is no other.
  left="$(tr , '\n' <<<"$gpus" | grep -vxF "${JUDGE_GPUS//,/$'\n'}" | paste -sd,)" || true
  if [[ -z "$left" ]]; then
    echo "error: the judge (JUDGE_GPUS=$JUDGE_GPUS) leaves no GPU of $gpus" >&2
    exit 2
  fi
  export CUDA_VISIBLE_DEVICES="$left"
fi
exec bash "$here/../multi_node/train_flux.sh" "$@"
