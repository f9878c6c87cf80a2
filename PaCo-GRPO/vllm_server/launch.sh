#!/usr/bin/env bash
# Start a judge server from PaCo-GRPO: VLLM_MODEL_PATHS=… VLLM_MODEL_NAMES=… [VLLM_PORT=8000] [VLLM_LABEL=default]
# bash vllm_server/launch.sh [--foreground]        (all variables: python -m vllm_server.launch --help)
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPO="$(cd "$HERE/../.." && pwd)"
PYTHON="${PYTHON:-}"
if [[ -z "$PYTHON" ]]; then
  if [[ -x "$REPO/.venv/bin/python" ]]; then PYTHON="$REPO/.venv/bin/python"; else PYTHON="python3"; fi
fi
PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.launch "$@"
