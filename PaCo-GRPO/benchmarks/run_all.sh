#!/usr/bin/env bash
# All benchmarks, unattended:
#
#   bash benchmarks/run_all.sh            on a machine with GPUs: FLUX.1-dev's real size
#   bash benchmarks/run_all.sh --cpu      on any machine: toy sizes, about an hour
#
# Writes a JSON report, tables (.md), a plot (.png) and a log for each line below to benchmarks/results. A report that
# exists is not measured again, so an interrupted run continues. A benchmark that fails is reported at the end and does
# not stop the others. --dry-run prints the commands. RESULTS names another folder, PYTHON another interpreter, and JUDGE
# a judge (folder or hub name) to launch and measure: on a CPU the quickstart's is measured by default.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repo="$(cd .. && pwd)"
export PYTHON="${PYTHON:-$repo/.venv/bin/python}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
[[ -x "$PYTHON" ]] || PYTHON=python3
results="${RESULTS:-benchmarks/results}" port="${VLLM_PORT:-8000}" size=gpu dry=false
for argument in "$@"; do
  case "$argument" in
    --cpu) size=cpu ;;
    --dry-run) dry=true ;;
    -h | --help) sed -n '2,11p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "error: unknown argument $argument (see --help)" >&2; exit 2 ;;
  esac
done
$dry || mkdir -p "$results"
declare -a failed=()

# run NAME PROGRAM ARGUMENTS… : one report, unless it exists
run() {
  local name="$1" program="$2" status smaller
  shift 2
  if $dry; then printf '%s' "$program"; printf ' %q' --output "$results/$name.json" "$@"; echo; return; fi
  if [[ -f "$results/$name.json" ]]; then echo "$name: exists"; return; fi
  for smaller in "" "--batch 2 --train-batch 1" "--batch 2 --train-batch 1 --config.enable_gradient_checkpointing=true"; do
    status=0
    # shellcheck disable=SC2086
    "$PYTHON" "benchmarks/$program" --output "$results/$name.json" "$@" $smaller >"$results/$name.log" 2>&1 || status=$?
    ((status == 3)) || break # 3: the GPU's memory is too small
  done
  echo "$name: exit status $status, log $results/$name.log"
  ((status == 0)) || failed+=("$name")
}

if [[ $size == cpu ]]; then
  export CUDA_VISIBLE_DEVICES="" JUDGE="${JUDGE:-$repo/quickstart/models/judge}"
  run published sweep.py --base work=published --variant "" -- --preset toy
  run options sweep.py --variant sample.merge_lora=true --variant sample.same_latent=true \
    --variant "sample.merge_lora=true sample.same_latent=true" --variant speed.fused_adam=true \
    --variant speed.overlap_decode=true --variant sample.batch_size=4 --variant sample.batch_size=64 -- --preset toy
  run images sweep.py --images --base sample.merge_lora=true \
    --variant "sample.merge_lora=true sample.tail_steps=4" \
    --variant "sample.merge_lora=true sample.tail_steps=4 sample.tail_order=2" \
    --variant "sample.merge_lora=true sample.tail_cache=0.1" --variant "sample.merge_lora=true sample.tail_cache=0.3" \
    --variant "sample.merge_lora=true sample.tail_weights=int8" --variant "sample.merge_lora=true max_sequence_length=64" \
    --variant sample.merge_lora=false --variant "sample.merge_lora=true speed.attention=_native_math" \
    -- --preset toy --k 2 --m 2 --batch 4 --lora-scale 0.01
  run resolution sweep.py --rounds 2 --base train.resolution=128 --variant train.resolution=256 \
    --variant train.resolution=384 --variant train.resolution=512 --variant train.resolution=768 \
    -- --preset narrow --k 1 --m 2 --batch 1 --steps 3
  run processes sweep.py --base "processes=1 OMP_NUM_THREADS=1" --variant "processes=2 OMP_NUM_THREADS=1" \
    -- --preset toy --k 2
  cores="$(env -u OMP_NUM_THREADS nproc)" # which obeys the variable
  kept="MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912"
  run environment sweep.py --base OMP_NUM_THREADS=1 --variant "OMP_NUM_THREADS=1 $kept" \
    --variant "OMP_NUM_THREADS=$cores" -- --preset toy --k 4
  run environment-512px sweep.py --rounds 2 --base OMP_NUM_THREADS=1 --variant "OMP_NUM_THREADS=1 $kept" \
    --variant "OMP_NUM_THREADS=$cores" -- --preset narrow --resolution 512 --k 2 --m 2 --batch 2 --train-batch 2 --steps 4
  run rewards epoch.py --preset toy --batch 4 --reward-seconds 0.05 --repeats 2 --profile
  run compile sweep.py --rounds 2 --variant speed.compile=true -- --preset toy --k 2
else
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
  if $dry; then gpus=8; fi
  if ((gpus == 0)); then echo "error: no GPU is visible; for a CPU: bash benchmarks/run_all.sh --cpu" >&2; exit 2; fi
  flux=(--preset flux-dev --batch 8 --train-batch 2)
  run epoch epoch.py "${flux[@]}" --repeats 3 --profile
  run published sweep.py --base work=published --variant "" -- "${flux[@]}"
  run options sweep.py --variant sample.merge_lora=true --variant sample.same_latent=true --variant speed.compile=true \
    --variant speed.fused_adam=false --variant enable_gradient_checkpointing=true --variant allow_tf32=true \
    --variant speed.overlap_decode=false --variant speed.offload_text_encoders=false \
    --variant speed.attention=_native_cudnn --variant speed.attention=_native_flash \
    --variant PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True -- "${flux[@]}"
  run images sweep.py --images --variant sample.tail_steps=4 --variant "sample.tail_steps=4 sample.tail_order=2" \
    --variant sample.tail_cache=0.1 --variant sample.tail_weights=int8 -- "${flux[@]}" --lora-scale 0.01
  run resolution sweep.py --rounds 2 --base train.resolution=128 --variant train.resolution=256 \
    --variant train.resolution=512 --variant train.resolution=768 --variant train.resolution=1024 \
    -- --preset flux-dev --k 4 --m 2 --batch 4 --train-batch 1
  run rewards epoch.py --preset flux-dev --batch 4 --train-batch 2 --repeats 2 --reward-seconds 0.2
  run kontext epoch.py --preset kontext-dev --batch 4 --train-batch 2 --repeats 2
  run qwen-edit epoch.py --preset qwen-edit --batch 2 --train-batch 1 --repeats 2
  counts=()
  for count in 2 4 8; do if ((count <= gpus)); then counts+=(--variant "processes=$count"); fi; done
  if ((gpus > 1)); then
    run processes sweep.py --rounds 2 --base processes=1 "${counts[@]}" -- --preset flux-dev --batch 4 --train-batch 1
  fi
fi
run engines compare_engines.py

# --- judge servers: the engine, the gateway in front of it, an epoch that it scores, and vLLM where it is installed -------
if [[ -n "${JUDGE:-}" ]]; then
  export VLLM_MODEL_PATHS="$JUDGE" VLLM_MODEL_NAMES=Judge MAX_MODEL_LEN="${MAX_MODEL_LEN:-2048}"
  launch() { $dry || VLLM_ENGINE="$1" VLLM_LABEL="benchmark-$1" VLLM_PORT="$2" bash vllm_server/launch.sh; }
  stop() { for engine in transformers vllm; do $dry || VLLM_LABEL="benchmark-$engine" bash vllm_server/stop.sh || true; done; }
  trap stop EXIT
  VLLM_GATEWAY=always launch transformers "$port"
  direct="$({ bash vllm_server/status.sh --json || true; } | "$PYTHON" -c '
import json, sys
rows = (row for row in json.load(sys.stdin) if row["label"] == "benchmark-transformers" and row["engine"] == "transformers")
print(next(rows, {"url": "http://127.0.0.1:8001"})["url"])')"
  gateway="http://127.0.0.1:$port"
  run gateway judge_load.py --model Judge --target "direct=$direct" --target "gateway=$gateway" --concurrency 1 16 64 --pairs 384
  # an untrained judge leaves many images without a score; the time is the same
  run judge epoch.py --preset toy --batch 8 --repeats 3 --judge "$gateway" --judge-model Judge \
    --config.train.max_missing_reward_fraction=1.0
  $dry || "$PYTHON" scripts/rehearse.py --config config/grpo.py:toy_t2is --run "$results/judge.json" --pairs 6 \
    --judge_load "$results/gateway.json" --judge_target gateway
  if [[ -x "${VLLM_PYTHON:-$repo/.venv-vllm/bin/python}" ]]; then
    OMP_NUM_THREADS=1 launch vllm "$((port + 1))"
    run judge-engines judge_load.py --model Judge --target "transformers=$gateway" --target "vllm=http://127.0.0.1:$((port + 1))"
  fi
fi
if ((${#failed[@]})); then echo "failed: ${failed[*]}" >&2; exit 1; fi
