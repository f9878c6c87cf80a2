#!/usr/bin/env bash
# Trains the judge: bash train/paco_reward.sh [CONFIG] [key=value …]
# One GPU or CPU by itself; several GPUs or nodes by the usual variables (CUDA_VISIBLE_DEVICES, NPROC_PER_NODE,
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT). Paths in a configuration are relative to PaCo-Reward/. PYTHON: interpreter
# (default: the activated environment, the repository's .venv, or python3).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/../tools/python.sh"
choose_python paco_reward
echo "train: with $PYTHON ($PYTHON_FROM)" >&2

CONFIG=config/paco_reward_lora.yaml
if [[ $# -gt 0 && ( "$1" != *=* || "${1%%=*}" == */* || -f "$1" ) ]]; then  # a path may hold =, a key no /
    CONFIG="$1"
    shift
    [[ -f "$CONFIG" ]] && CONFIG="$(realpath "$CONFIG")"
fi

export LLAMAFACTORY_VERBOSITY="${LLAMAFACTORY_VERBOSITY:-WARN}"

cd "$ROOT"
exec "$PYTHON" -m paco_reward.cli train "$CONFIG" "$@"
