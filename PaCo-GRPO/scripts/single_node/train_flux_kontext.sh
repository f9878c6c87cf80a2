#!/usr/bin/env bash
# Train FLUX.1-Kontext on this machine:  bash scripts/single_node/train_flux_kontext.sh kontext_editing [--config.a.b=value …]
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"  # the configuration names the model
