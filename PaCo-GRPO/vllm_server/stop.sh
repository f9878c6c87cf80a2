#!/usr/bin/env bash
# End the servers of one launch, and no other process:  VLLM_LABEL=editor bash vllm_server/stop.sh
#
#   VLLM_LABEL             the launch's (default: default)
#   PACO_RUNTIME_DIR       the launch's (default: ~/.local/state/paco-rl/HOST)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
show_help "$0" "$@"
choose_python psutil pydantic httpx filelock
export PYTHONPATH="$here/..:$here/../../PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m vllm_server.servers stop "$@"
