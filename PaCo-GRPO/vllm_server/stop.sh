#!/usr/bin/env bash
# End the servers of one label: VLLM_LABEL=… bash vllm_server/stop.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPO="$(cd "$HERE/../.." && pwd)"
PYTHON="${PYTHON:-}"
if [[ -z "$PYTHON" ]]; then
  if [[ -x "$REPO/.venv/bin/python" ]]; then PYTHON="$REPO/.venv/bin/python"; else PYTHON="python3"; fi
fi
PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.stop "$@"
