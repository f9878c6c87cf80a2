#!/usr/bin/env bash
# As train_flux.sh, with an editing configuration:  bash scripts/single_node/train_flux_kontext.sh kontext_editing
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
