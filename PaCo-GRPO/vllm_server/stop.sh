#!/usr/bin/env bash
# End the servers of one label: VLLM_LABEL=… bash vllm_server/stop.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
choose_python psutil pydantic fastapi httpx uvicorn
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.status --stop "$@"
