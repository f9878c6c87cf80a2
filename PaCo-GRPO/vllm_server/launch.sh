#!/usr/bin/env bash
# Start judge servers from PaCo-GRPO: VLLM_MODEL_PATHS=… VLLM_MODEL_NAMES=… [VLLM_PORT=8000] [VLLM_LABEL=default]
# bash vllm_server/launch.sh [--foreground]        (all variables: bash vllm_server/launch.sh --help)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
choose_python psutil
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.launch "$@"
