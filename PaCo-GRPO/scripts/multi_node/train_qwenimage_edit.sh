#!/usr/bin/env bash
# As train_flux.sh, with an editing configuration:  bash scripts/multi_node/train_qwenimage_edit.sh qwen_editing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh" "$@"
