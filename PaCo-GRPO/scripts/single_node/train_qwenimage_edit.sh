#!/usr/bin/env bash
# Train Qwen-Image-Edit on this machine:  bash scripts/single_node/train_qwenimage_edit.sh NAME [--config.a.b=value …]
# NAME is a configuration in config/grpo.py (qwen_editing, toy_qwen_edit, …) or a config.yaml saved by an earlier run.
# The configuration names the model, so everything else is train_flux.sh's.
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
