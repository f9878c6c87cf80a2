#!/usr/bin/env bash
# Show which servers run: bash vllm_server/status.sh [--json]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
choose_python psutil pydantic fastapi httpx uvicorn
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m vllm_server.status "$@"
