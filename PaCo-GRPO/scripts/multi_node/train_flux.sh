#!/usr/bin/env bash
# Train on several machines; on each machine, with a different NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 \
#     bash scripts/multi_node/train_flux.sh t2is [--config.a.b=value …]
#
#   NNODES             machines (required)
#   NODE_RANK          number of this one, 0 to NNODES-1 (required)
#   MASTER_ADDR        name or address of machine 0 (required)
#   MASTER_PORT        its port (default 29500)
#   NUM_PROCESSES      processes on this machine (default: its visible GPUs); machines may differ
#
# The run folder (config.save_dir) must be on a file system that all machines share. docs/scaling.md
# has a complete example, and scripts/slurm/ the same for Slurm.
# Names and options:  bash scripts/single_node/train_flux.sh --help
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$scripts/../../tools/python.sh"
show_help "$0" "$@"
variables="NNODES (machines), NODE_RANK (this one), MASTER_ADDR and MASTER_PORT (of machine 0)"
: "${NNODES:?set $variables}"
exec bash "$scripts/single_node/train_flux.sh" "$@"
