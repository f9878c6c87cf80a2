#!/usr/bin/env bash
# Used by run.sh and editing.sh: sets up the environment, then starts one of the drivers in paco_toy.
#   bash quickstart/driver.sh quickstart|editing [ARGUMENTS]
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$repo/setup.sh"
source "$repo/tools/python.sh"  # its settings of glibc, for the commands that are started without a script
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHON="$repo/.venv/bin/python"
# exec: Ctrl-C and SIGTERM reach the driver itself, which then ends everything it started (the judge's server too).
exec "$PYTHON" -m "paco_toy.$1" "${@:2}"
