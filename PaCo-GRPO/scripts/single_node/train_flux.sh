#!/usr/bin/env bash
# Train on one machine:  bash scripts/single_node/train_flux.sh NAME [--config.a.b=value …]
#
# NAME is a configuration in config/grpo.py (t2is, toy_t2is, …), one of your own (my_configs.py:name)
# or a config.yaml saved by an earlier run. A name that does not exist lists all of them.
# docs/configuration.md describes the options, as does
#   bash scripts/single_node/train_flux.sh t2is --help
#
# Example, on four GPUs:
#   NUM_PROCESSES=4 bash scripts/single_node/train_flux.sh t2is_80gb --config.run_name=first
#
# Variables (NUM_PROCESSES, PYTHON, …):  bash scripts/launch.sh --help
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$scripts/../../tools/python.sh"
show_help "$0" "$@"

if (($# == 0)) || [[ "$1" == -* ]]; then
  echo "usage: bash scripts/single_node/$(basename "$0") NAME [--config.a.b=value …];" \
    "--help says more" >&2
  exit 2
fi
name="$1"
shift
case "$name" in
  *.yaml | *.yml | *.py | *.py:*) source="$name" ;;
  *) source="config/grpo.py:$name" ;;
esac
exec bash "$scripts/launch.sh" --config "$source" "$@"
