#!/usr/bin/env bash
# An editor learns to do as it is told, on a CPU: RL of a toy FLUX Kontext or Qwen-Image-Edit on "make the star blue".
#   bash quickstart/editing.sh [--editor NAME] [--minutes M] [--seed N] [--fresh]      (--help says more)
# Installs on first use. Run again, it goes on; with more --minutes it trains longer.
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$repo/setup.sh"
# Small tensors, allocated and freed all the time: glibc would return the memory to the system at every turn.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-536870912}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHON="$repo/.venv/bin/python"
exec "$PYTHON" -m paco_toy.editing "$@"
