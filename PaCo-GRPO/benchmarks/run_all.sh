#!/usr/bin/env bash
# Every benchmark of this folder, unattended, with one command:
#
#   bash benchmarks/run_all.sh            on a machine with GPUs: FLUX.1-dev's real size
#   bash benchmarks/run_all.sh --cpu      on any machine: toy widths, about 40 minutes; begins nothing later (LIMIT, seconds)
#
# Writes benchmarks/results/MACHINE/*.json, tables.md, plots and logs, and the tables into benchmarks/README.md. A report
# that is there already is not measured again (so a run that was cut off goes on); --again deletes them first. A benchmark
# that fails is reported at the end and does not stop the others. --dry-run prints the commands. RESULTS and README name
# another folder and file, PYTHON another interpreter.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
PYTHON="${PYTHON:-$(cd .. && pwd)/.venv/bin/python}"
[[ -x "$PYTHON" ]] || PYTHON=python3

# --- what is compared: exact options, off and on, at the counting test's workload; one line each ------------------------
# KEY=BASE,OTHER as epoch.py --compare takes it (KEY+KEY=… for several options at once). One that this version does not
# have is left out, with a line.
COMPARISONS=(
  "work=published,ours"
  "sample.merge_lora=off,on"
  "sample.same_latent=off,on"
  "sample.merge_lora+sample.same_latent=off,on"
)
CPU_COMPARISONS=(
  "speed.fused_adam=None,on" # None: by itself, which is off on a CPU
  "speed.overlap_decode=None,on"
  "sample.batch_size=16,4,64"
)
COMPILED="speed.compile=off,on" # apart, since its first epoch takes minutes
# In several reports: each setting has its own LoRA and optimizer on the GPU, 2.7 GB at FLUX.1-dev's size.
GPU_OPTIONS=(
  "speed.fused_adam=off,None" # and on on a GPU
  "enable_gradient_checkpointing=off,on"
  "allow_tf32=off,on"
  "speed.overlap_decode=off,None"
)
GPU_PLACES=(
  "speed.offload_text_encoders=off,None"
  "speed.attention=None,_native_cudnn,_native_flash"
)
GPU_TAILS=( # approximate: what they change in the images is for effects.py
  "sample.tail_steps=None,4"
  "sample.tail_cache=0,0.1"
  "sample.tail_weights=None,int8"
)
# What an option changes in the images, and what it gains in sampling.
EFFECTS=(
  --setting sample.tail_steps=4 --setting sample.tail_steps=4,sample.tail_order=2 --setting sample.tail_order=2
  --setting sample.tail_cache=0.1 --setting sample.tail_cache=0.3 --setting sample.tail_weights=int8
)
CPU_EFFECTS=(--setting max_sequence_length=64 --setting sample.merge_lora=false --setting speed.attention=_native_math)
# What a process reads when it starts; the first is the base. Kept memory: glibc returns less of it to the system.
KEPT="MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912"
CPU_ENVIRONMENTS=(
  --setting "OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_= MALLOC_TRIM_THRESHOLD_="
  --setting "OMP_NUM_THREADS=1 $KEPT"
  --setting "OMP_NUM_THREADS=$(env -u OMP_NUM_THREADS nproc) MALLOC_MMAP_THRESHOLD_= MALLOC_TRIM_THRESHOLD_="
)
GPU_ENVIRONMENTS=(
  --setting "PYTORCH_CUDA_ALLOC_CONF="
  --setting "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
# ------------------------------------------------------------------------------------------------------------------------

size=gpu again=false dry=false
for argument in "$@"; do
  case "$argument" in
    --cpu) size=cpu ;;
    --again) again=true ;;
    --dry-run) dry=true ;;
    -h | --help) sed -n '2,12p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "error: unknown argument $argument (see --help)" >&2; exit 2 ;;
  esac
done
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [[ $size == cpu ]]; then
  export CUDA_VISIBLE_DEVICES=""
else
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
  if $dry; then gpus=8; fi
  if ((gpus == 0)); then echo "error: no GPU is visible; for a CPU: bash benchmarks/run_all.sh --cpu" >&2; exit 2; fi
fi

export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
machine="$("$PYTHON" -m measuring.machine)" || { echo "error: $PYTHON lacks the packages: bash setup.sh in the repository's root" >&2; exit 2; }
results="${RESULTS:-benchmarks/results/$machine}"
README="${README:-benchmarks/README.md}"
$dry || mkdir -p "$results"
if $again && ! $dry; then rm -f "$results"/*.json "$results"/*.png "$results"/tables.md; fi
echo "results go to $results"
declare -a failed=() left=()

# measure NAME PROGRAM ARGUMENTS… : one report, unless it is there; exit status of the program
measure() {
  local name="$1" program="$2" begun=$SECONDS status=0
  shift 2
  # --output first: what follows a -- is not the program's own
  set -- --output "$results/$name.json" "$@"
  if $dry; then printf '%s' "$program"; printf ' %q' "$@"; echo; return 0; fi
  if [[ -f "$results/$name.json" ]]; then echo "$name: there already"; return 0; fi
  if [[ $size == cpu ]] && ((SECONDS > ${LIMIT:-2700})); then left+=("$name"); return 0; fi
  echo "$name: $program ${*:3}"
  "$PYTHON" "benchmarks/$program" "$@" >"$results/$name.log" 2>&1 || status=$?
  if ((status == 0)) && [[ ! -f "$results/$name.json" ]]; then echo "no report was written" >>"$results/$name.log" && status=1; fi
  if ((status)); then
    echo "$name: failed with status $status after $((SECONDS - begun)) s, last lines of $results/$name.log:" >&2
    tail -n 3 "$results/$name.log" >&2
  else
    echo "$name: done in $((SECONDS - begun)) s"
  fi
  return "$status"
}

# must NAME … : as measure, remembering failures
must() { measure "$@" || failed+=("$1"); }

# world NAME ARGUMENTS… : effects.py on the quickstart's prompts, which are drawn where they are not there
world() {
  local prompts=../quickstart/out/world/prompts
  if ! $dry && [[ ! -d "$prompts" && ! -f "$results/$1.json" ]]; then
    (cd ../quickstart && "$PYTHON" -m paco_toy.build_world --out out/world) >"$results/world.log" 2>&1
  fi
  must "$1" effects.py "${@:2}"
}

# fitting NAME PROGRAM ARGUMENTS… : as must, with less memory at each try while the GPU's is not enough (status 3)
fitting() {
  local name="$1" status=0 smaller
  for smaller in "" "--train-batch 1" "--batch 2 --train-batch 1" \
    "--batch 2 --train-batch 1 --config.enable_gradient_checkpointing=true"; do
    status=0
    # shellcheck disable=SC2086
    measure "$@" $smaller || status=$?
    ((status == 3)) || break
  done
  ((status == 0)) || failed+=("$name")
}

known="$("$PYTHON" -m measuring.options)"
compare=()
# among COMPARISON… : those whose options there are, in `compare`
among() {
  local each key missing
  compare=()
  for each in "$@"; do
    missing=""
    while read -r -d + key; do
      if [[ "$key" != work ]] && ! grep -qx -- "$key" <<<"$known"; then missing="$key"; fi
    done <<<"${each%%=*}+"
    if [[ -z "$missing" ]]; then compare+=(--compare "$each"); else echo "no option $missing: $each is left out"; fi
  done
}
# compared NAME COMPARISON… : at FLUX.1-dev's size
compared() {
  among "${@:2}"
  ((${#compare[@]})) && fitting "$1" epoch.py --preset flux-dev --batch 8 --train-batch 2 "${compare[@]}" --repeats 3
}

if [[ $size == cpu ]]; then
  among "${COMPARISONS[@]}" "${CPU_COMPARISONS[@]}"
  must epoch-counting epoch.py --preset toy "${compare[@]}" --repeats 3
  must epoch-rewards epoch.py --preset toy --batch 4 --reward-seconds 0.05 --repeats 2 --profile
  must resolution_sweep resolution_sweep.py --preset narrow --resolutions 128 256 384 512 768 --k 1 --m 2 --batch 1 \
    --steps 3 --repeats 2 --counted flux-dev kontext-dev --text 512 128
  must scaling scaling.py --processes 1 2 --rounds 2 --repeats 2 -- --preset toy --k 2
  world effects-toy --config config/grpo.py:toy_t2is --config.sample.num_steps=10 --images 4 --rounds 3 \
    "${EFFECTS[@]}" "${CPU_EFFECTS[@]}"
  must environment environment.py "${CPU_ENVIRONMENTS[@]}" --rounds 3 --repeats 2 -- --preset toy --k 4
  must environment-512px environment.py "${CPU_ENVIRONMENTS[@]}" --rounds 2 --repeats 3 -- \
    --preset narrow --resolution 512 --k 2 --m 2 --batch 2 --train-batch 2 --steps 4
  among "$COMPILED"
  if ((${#compare[@]})); then must epoch-compiled epoch.py --preset toy --k 2 "${compare[@]}" --repeats 2; fi
else
  fitting epoch-counting epoch.py --preset flux-dev --batch 8 --train-batch 4 --repeats 3 --profile
  compared epoch-compared "${COMPARISONS[@]}"
  compared epoch-options "${GPU_OPTIONS[@]}"
  compared epoch-places "${GPU_PLACES[@]}"
  compared epoch-tails "${GPU_TAILS[@]}"
  compared epoch-compiled "$COMPILED"
  fitting epoch-rewards epoch.py --preset flux-dev --batch 4 --train-batch 2 --repeats 2 --reward-seconds 0.2
  fitting resolution_sweep resolution_sweep.py --preset flux-dev --batch 4 --train-batch 1 --k 4 --m 2 --repeats 2 \
    --counted flux-dev kontext-dev --text 512 128
  must environment environment.py "${GPU_ENVIRONMENTS[@]}" --rounds 2 --repeats 2 -- \
    --preset flux-dev --batch 4 --train-batch 1
  fitting epoch-kontext epoch.py --preset kontext-dev --batch 4 --train-batch 2 --repeats 2
  fitting epoch-qwen epoch.py --preset qwen-edit --batch 2 --train-batch 1 --repeats 2
  counts=(1)
  for count in 2 4 8; do if ((count <= gpus)); then counts+=("$count"); fi; done
  if ((gpus > 1)); then
    must scaling scaling.py --processes "${counts[@]}" --rounds 2 --repeats 2 -- --preset flux-dev --batch 4 --train-batch 1
  else
    echo "scaling: one GPU, so there is nothing to scale over"
  fi
fi

must compare_engines compare_engines.py

judges=(bash benchmarks/judges.sh "$results")
if [[ $size == gpu && -z "${JUDGE:-}" ]]; then
  echo "judges: left out; JUDGE=FOLDER OR HUB NAME measures that one"
elif $dry; then
  echo "${judges[*]}"
elif [[ $size == cpu ]] && ((SECONDS > ${LIMIT:-2700})); then
  left+=(judges)
else
  echo "judges: ${judges[*]}"
  if PYTHON="$PYTHON" "${judges[@]}" >"$results/judges.log" 2>&1; then
    echo "judges: done"
  else
    failed+=(judges)
    tail -n 3 "$results/judges.log" >&2
  fi
fi

if $dry; then exit 0; fi
"$PYTHON" benchmarks/tables.py benchmarks/results/*/ "$results" --readme "$README" || failed+=(tables)
echo "finished in $SECONDS s: $results/tables.md"
if ((${#left[@]})); then echo "left for another run of the same command: ${left[*]}"; fi
if ((${#failed[@]})); then echo "failed: ${failed[*]}" >&2; exit 1; fi
