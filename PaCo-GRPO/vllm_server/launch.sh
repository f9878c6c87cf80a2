#!/usr/bin/env bash
# Start judge servers from PaCo-GRPO: VLLM_MODEL_PATHS=… VLLM_MODEL_NAMES=… [VLLM_PORT=8000] [VLLM_LABEL=default]
# bash vllm_server/launch.sh [--foreground]        (all variables: bash vllm_server/launch.sh --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
run_module launch "$@"
