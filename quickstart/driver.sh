#!/usr/bin/env bash
# Used by run.sh and editing.sh: sets up the environment, then starts one of the drivers in paco_toy.
#   bash quickstart/driver.sh quickstart|editing [ARGUMENTS]
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$repo/setup.sh"
# Small tensors are allocated and freed all the time: keep glibc from returning the memory to the system each time.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-536870912}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHON="$repo/.venv/bin/python"
# exec: Ctrl-C and SIGTERM reach the driver itself, which then ends everything it started (the judge's server too).
exec "$PYTHON" -m "paco_toy.$1" "${@:2}"
