#!/usr/bin/env bash
# Train Qwen-Image-Edit on one machine:
#   bash scripts/single_node/train_qwenimage_edit.sh qwen_editing_80gb [--config.a.b=value …]
#
# As train_flux.sh, which describes names, options and variables:
#   bash scripts/single_node/train_flux.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
