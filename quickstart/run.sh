#!/usr/bin/env bash
# PaCo-RL end to end on a CPU: train a judge, serve it, improve a generator with it, show both.
#   bash quickstart/run.sh [--seed N] [--fresh] [--rebuild] [--minutes M]      (see --help)
# Installs on first use. A second run continues after the last finished stage.
exec bash "$(dirname "${BASH_SOURCE[0]}")/driver.sh" quickstart "$@"
