#!/usr/bin/env bash
# Train FLUX.1-Kontext on several machines; on each machine, with a different NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 bash scripts/multi_node/train_flux_kontext.sh kontext_editing [--config.a.b=value …]
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_flux.sh" "$@"  # the configuration names the model
