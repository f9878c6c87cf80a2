#!/usr/bin/env bash
# Train Qwen-Image-Edit on several machines; on each machine, with a different NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 \
#     bash scripts/multi_node/train_qwenimage_edit.sh qwen_editing_80gb [--config.a.b=value …]
#
# As train_flux.sh, which describes the variables:  bash scripts/multi_node/train_flux.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh"
