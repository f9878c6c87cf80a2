#!/usr/bin/env bash
# End the servers of one launch, and no other process:  VLLM_LABEL=editor bash vllm_server/stop.sh
#
#   VLLM_LABEL             the launch's (default: default)
#   PACO_RUNTIME_DIR       the launch's (default: ~/.local/state/paco-rl/HOST)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
show_help "$0" "$@"
choose_python psutil pydantic fastapi httpx uvicorn
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m vllm_server.status --stop "$@"
