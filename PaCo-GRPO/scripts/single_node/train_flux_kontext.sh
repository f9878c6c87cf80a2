#!/usr/bin/env bash
# Train FLUX.1-Kontext on one machine:
#   bash scripts/single_node/train_flux_kontext.sh kontext_editing [--config.a.b=value …]
#
# As train_flux.sh, which describes names, options and variables:
#   bash scripts/single_node/train_flux.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
