#!/usr/bin/env bash
# End the servers of one label: VLLM_LABEL=… bash vllm_server/stop.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
run_module stop "$@"
