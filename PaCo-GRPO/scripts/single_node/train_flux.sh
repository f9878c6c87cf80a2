#!/usr/bin/env bash
# Train FLUX.1 on one machine:  bash scripts/single_node/train_flux.sh NAME [--config.a.b=value …]
# NAME is a configuration in config/grpo.py (t2is, toy_t2is, …) or a config.yaml saved by an earlier run.
# Environment variables: see scripts/launch.sh.
set -euo pipefail

if (($# == 0)) || [[ "$1" == -* ]]; then
  echo "usage: bash scripts/single_node/$(basename "$0") NAME [--config.a.b=value …]" >&2
  exit 2
fi
name="$1"
shift
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "$name" in
  *.yaml | *.yml) source="$(cd "$(dirname "$name")" && pwd)/$(basename "$name")" ;;
  *.py:*) source="$name" ;;
  *) source="config/grpo.py:$name" ;;
esac
exec bash "$scripts/launch.sh" --config "$source" "$@"
