#!/usr/bin/env bash
# RL of a toy image editor on a CPU: FLUX Kontext on instructions such as "make the star blue",
# rewarded by the oracle.
#   bash quickstart/editing.sh [--seed N] [--minutes M] [--fresh] [--config.a.b=value …]
# --seed N            of the edits and of RL (default 0)
# --minutes M         most time for RL's epochs (default 5); with more, RL goes on
# --config.a.b=value  passed to the training script
# --fresh             deletes the results and starts over; without it, a second run continues, and
#                     needs the same settings
# Everything is written to quickstart/out/editing. Installs on first use.
# QUICKSTART_DEVICE=gpu  uses this machine's GPUs; the default, cpu, does the same on every machine
set -euo pipefail
minutes=5
total=3
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out="$out/editing"
training=run
cleanup() { :; }
begin toy_kontext "$@"

if stage edits 0.2 "World: render scenes and instructions"; then
    run quickstart 1-edits python -m paco_toy.build_world edits --seed "$seed" --out "$out/edits"
    finish
fi
if stage rl 8 "RL: PaCo-GRPO trains FLUX Kontext at 64 px"; then
    run PaCo-GRPO 2-rl bash scripts/single_node/train_flux_kontext.sh toy_kontext \
        "--config.seed=$seed" \
        --config.save_dir=../quickstart/out/editing \
        --config.run_name=run \
        --config.resume_from=latest \
        "--config.max_train_minutes=$minutes" \
        "${overrides[@]}"
    finish
fi
report "$training" "RL of a toy editor"
