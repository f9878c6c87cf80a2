#!/usr/bin/env bash
# Show which servers run: bash vllm_server/status.sh [--json]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
run_module status "$@"
