#!/usr/bin/env bash
# An editor learns to do as it is told, on a CPU: RL of a toy FLUX Kontext or Qwen-Image-Edit on "make the star blue".
#   bash quickstart/editing.sh [--editor NAME] [--minutes M] [--seed N] [--fresh]      (--help says more)
# Installs on first use. Run again, it goes on; with more --minutes it trains longer.
exec bash "$(dirname "${BASH_SOURCE[0]}")/driver.sh" editing "$@"
