#!/usr/bin/env bash
# Train the judge:  bash train/paco_reward.sh [CONFIG] [key=value …]
#
# CONFIG is a file (default: config/paco_reward_lora.yaml). Paths in it are relative to PaCo-Reward/.
# key=value replaces one of its values.
#
#   CUDA_VISIBLE_DEVICES   GPUs (default: all)
#   NPROC_PER_NODE         processes on this machine (default: one per GPU, or two on a CPU)
#   NNODES, NODE_RANK      machines and number of this one (default: 1, 0)
#   MASTER_ADDR, MASTER_PORT   where machine 0 is reached (default: 127.0.0.1 and a free port; with
#                          several machines 29500)
#   PYTHON                 interpreter (default: the activated environment, the repository's .venv,
#                          or python3)
#   LLAMAFACTORY_VERBOSITY log level of LLaMA-Factory (default: WARN)
#
# Example:  CUDA_VISIBLE_DEVICES=0,1 bash train/paco_reward.sh num_train_epochs=1
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/../tools/python.sh"
show_help "$0" "$@"
choose_python paco_reward
echo "train: with $PYTHON ($PYTHON_FROM)" >&2

CONFIG=config/paco_reward_lora.yaml
# A path may hold =, a key no /.
if [[ $# -gt 0 && ( "$1" != *=* || "${1%%=*}" == */* || -f "$1" ) ]]; then
    CONFIG="$1"
    shift
    [[ -f "$CONFIG" ]] && CONFIG="$(realpath "$CONFIG")"
fi

export LLAMAFACTORY_VERBOSITY="${LLAMAFACTORY_VERBOSITY:-WARN}"

cd "$ROOT"
exec "$PYTHON" -m paco_reward.cli train "$CONFIG" "$@"
