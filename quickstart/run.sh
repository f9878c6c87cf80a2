#!/usr/bin/env bash
# PaCo-RL end to end on a CPU: trains a judge, serves it, trains a generator with it, and writes a
# report.
#   bash quickstart/run.sh [--seed N] [--minutes M] [--fresh] [--config.a.b=value …]
# --seed N            of data, judge and RL (default 0)
# --minutes M         most time for RL's 16 epochs (default 12); with more, RL goes on
# --config.a.b=value  passed to the training script
# --fresh             deletes the results and starts over; without it, a second run continues after
#                     the last finished stage, and needs the same settings
# Everything is written to quickstart/out, each command's output to quickstart/out/logs. Installs on
# first use. The judge's server has a port of this clone's own; VLLM_PORT=N chooses another.
# QUICKSTART_DEVICE=gpu  uses this machine's GPUs; the default, cpu, does the same on every machine
set -euo pipefail
minutes=12
total=6
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
training=runs/toy_t2is_nft
# Another clone has another server, on another port.
clone_id="$(cksum <<<"$repo" | cut -d' ' -f1)"
label="paco-quickstart-$clone_id"
port="${VLLM_PORT:-$((20000 + clone_id % 10000))}"
stop_server() {
    (
        cd "$repo/PaCo-GRPO" &&
            VLLM_LABEL="$label" bash vllm_server/stop.sh 9>&- >/dev/null 2>&1
    ) || true
}
cleanup() { stop_server; }
begin toy_t2is_nft "$@"

world="$out/world"
toy=../quickstart # as seen from PaCo-Reward and PaCo-GRPO

if stage world 1 "World: render prompts and grids, build the judge's pairs"; then
    rm -rf "$world"
    build_world=(python -m paco_toy.build_world --seed "$seed")
    build_dataset=(
        paco-reward build-dataset --seed "$seed" --name toy_pairs
        --grids "$toy/out/world/drawn/grids"
        --metadata "$toy/out/world/drawn/metadata.jsonl"
        --output "$toy/out/world/reward_data"
    )
    run quickstart 1-world "${build_world[@]}" world --out "$world"
    run PaCo-Reward 1-sets "${build_dataset[@]}" --sets_only
    run quickstart 1-annotate "${build_world[@]}" annotate --out "$world"
    run PaCo-Reward 1-pairs "${build_dataset[@]}" \
        --rankings "$toy/out/world/drawn/rankings.jsonl" \
        --reasons_file "$toy/out/world/drawn/reasons.jsonl"
    run quickstart 1-finish "${build_world[@]}" finish --out "$world"
    finish
fi

if stage judge 5 "Judge: LoRA of Qwen2.5-VL with the first-token-weighted loss"; then
    rm -rf "$out/judge" "$out/judge_lora" "$out/judge_base.json"
    accuracy=(
        paco-reward accuracy --model "$toy/models/judge"
        --dataset_dir "$toy/out/world/reward_data"
        --dataset "toy_pairs_full_test,toy_pairs_open_test,toy_pairs_none_test,toy_pairs_weak_test"
    )
    # The base has no score of many pairs: its exit status is 1, and its numbers are written.
    run PaCo-Reward 2-accuracy-base bash -c '"$@" || [[ -s "${!#}" ]]' - \
        "${accuracy[@]}" --output "$out/judge_base.json"
    run PaCo-Reward 2-train bash train/paco_reward.sh config/toy_reward_lora.yaml \
        "seed=$seed" "data_seed=$seed" "output_dir=$toy/out/judge_lora"
    run PaCo-Reward 2-accuracy-lora "${accuracy[@]}" --adapter "$toy/out/judge_lora" \
        --output "$out/judge_lora.json"
    run PaCo-Reward 2-export paco-reward export --base "$toy/models/judge" \
        --adapter "$toy/out/judge_lora" --output "$toy/out/judge"
    finish
fi

if stage rank 1 "Benchmark: rankings in ConsistencyRank-Bench's format"; then
    rank_results="$out/rank_results"
    rm -rf "$rank_results"
    benchmark=PaCo-Reward/evaluation/Consistency_Rank
    run $benchmark 3-rank-judge python eval_vllm.py --model "$out/judge" --engine transformers \
        --batch_size 32 --dataset_dir "$world" --results_dir "$rank_results"
    run $benchmark 3-rank-histogram python eval.py --scorer histogram \
        --dataset_dir "$world" --results_dir "$rank_results"
    run $benchmark 3-rank-table python print_eval_table.py --results_dir "$rank_results" \
        --output_file "$out/rank_table.txt" --output_format txt
    cat "$out/rank_table.txt"
    finish
fi

if grep -q "^rl " "$done_file"; then
    stage server 0 "Server: the judge over HTTP" || true
else
    sed -i '/^server /d' "$done_file" # it did not outlive the last run
    stage server 0.3 "Server: the judge over HTTP"
    # It answers while the trainers wait. With more threads, such small matrices take longer.
    OMP_NUM_THREADS=2 VLLM_MODEL_PATHS="$out/judge" \
        VLLM_MODEL_NAMES=PaCo-Reward-Toy VLLM_PORT="$port" VLLM_LABEL="$label" \
        run PaCo-GRPO 4-launch bash vllm_server/launch.sh
    finish
fi

if stage rl 5 "RL: PaCo-GRPO trains FLUX at 64 px, evaluated at 128 px"; then
    run PaCo-GRPO 5-rl bash scripts/single_node/train_flux.sh toy_t2is_nft \
        "--config.seed=$seed" \
        "--config.save_dir=$toy/out/runs" \
        --config.run_name=toy_t2is_nft \
        --config.resume_from=latest \
        "--config.max_train_minutes=$minutes" \
        "--config.train.reward_fn_kwargs.consistency_score.port=$port" \
        "--config.train.reward_fn_kwargs.between_images.port=$port" \
        "${overrides[@]}"
    finish
fi
stop_server

report "$training" "PaCo-RL quickstart"
