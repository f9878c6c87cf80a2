#!/usr/bin/env bash
# Show which servers run and whether they answer:  bash vllm_server/status.sh
#
# Exit status: 0 if all are healthy, 3 if one is not, 1 after errors. States: healthy; loading or
# stuck; other key (VLLM_API_KEY is not the one of the launch); ended.
#
#   VLLM_API_KEY           the launch's (default: none)
#   PACO_RUNTIME_DIR       the launch's (default: ~/.local/state/paco-rl/HOST)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
show_help "$0" "$@"
choose_python psutil pydantic httpx filelock
export PYTHONPATH="$here/..:$here/../../PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m vllm_server.servers status "$@"
