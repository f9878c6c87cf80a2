#!/usr/bin/env bash
# Train FLUX.1-Kontext on this machine:  bash scripts/single_node/train_flux_kontext.sh NAME [--config.a.b=value …]
# NAME is a configuration in config/grpo.py (kontext_editing, toy_kontext, …) or a config.yaml saved by an earlier run.
# The configuration names the model, so everything else is train_flux.sh's.
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
