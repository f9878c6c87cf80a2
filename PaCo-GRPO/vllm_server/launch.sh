#!/usr/bin/env bash
# Start judge servers from PaCo-GRPO: VLLM_MODEL_PATHS=… VLLM_MODEL_NAMES=… [VLLM_PORT=8000] [VLLM_LABEL=default]
# bash vllm_server/launch.sh        (all variables: vllm_server/README.md)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
choose_python psutil pydantic fastapi httpx uvicorn
PYTHONPATH="$here/..:$here/../../PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.launch "$@"
