#!/usr/bin/env bash
# EditReward-Bench in the activated environment (all options: --help):
#   bash evaluate_vllm_PaCoReward.sh [--model X …]
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../../tools/python.sh"
choose_python PIL
exec "$PYTHON" "$HERE/evaluation.py" "$@"
