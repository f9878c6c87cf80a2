#!/usr/bin/env bash
# Train Qwen-Image-Edit on this machine:  bash scripts/single_node/train_qwenimage_edit.sh qwen_editing [--config.a.b=value …]
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"  # the configuration names the model
