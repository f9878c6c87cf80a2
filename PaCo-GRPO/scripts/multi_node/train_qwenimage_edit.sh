#!/usr/bin/env bash
# Train Qwen-Image-Edit on several machines; on each machine, with a different NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 bash scripts/multi_node/train_qwenimage_edit.sh qwen_editing [--config.a.b=value …]
# The run folder (config.save_dir) must be on a file system that all machines share. Variables: see scripts/launch.sh.
set -euo pipefail
: "${NNODES:?set NNODES (machines), NODE_RANK (this one), MASTER_ADDR and MASTER_PORT (where machine 0 is reached)}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../single_node/train_qwenimage_edit.sh" "$@"
