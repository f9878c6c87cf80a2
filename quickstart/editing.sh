#!/usr/bin/env bash
# RL of a toy image editor on a CPU: FLUX Kontext or Qwen-Image-Edit on instructions such as "make the star blue".
#   bash quickstart/editing.sh [--editor NAME] [--minutes M] [--seed N] [--fresh]      (see --help)
# Installs on first use. A second run continues; with more --minutes it trains longer.
exec bash "$(dirname "${BASH_SOURCE[0]}")/driver.sh" editing "$@"
