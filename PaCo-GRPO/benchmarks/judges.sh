#!/usr/bin/env bash
# Judge servers, launched, measured and stopped again:  bash benchmarks/judges.sh [FOLDER OF REPORTS]
#
#   judge_gateway   one engine, directly and through the gateway
#   epoch-judge     an epoch of the toy generator scored by it, and what scripts/plan_gpus.py would have predicted
#   judge_engines   vLLM beside the transformers engine (where the environment of vLLM is installed: setup.sh --vllm)
#
# JUDGE is the model (default: the quickstart's, untrained, which takes as long as a trained one), PAIRS and ROUNDS are
# those of judge_load.py, VLLM_PORT and the next port are taken. A report that is there already is not measured again.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then sed -n '2,9p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0; fi
results="$(realpath -m --relative-to "$here/.." "${1:-$here/results/judges}")"
cd "$here/.."
repo="$(cd .. && pwd)"
export PYTHON="${PYTHON:-$repo/.venv/bin/python}"
export VLLM_MODEL_PATHS="${JUDGE:-$repo/quickstart/models/judge}" VLLM_MODEL_NAMES=Judge MAX_MODEL_LEN="${MAX_MODEL_LEN:-2048}"
port="${VLLM_PORT:-8000}"
pairs="${PAIRS:-384}" rounds="${ROUNDS:-5}"
label="benchmark-$$"
mkdir -p "$results"

launch() { VLLM_ENGINE="$1" VLLM_LABEL="$label-$1" VLLM_PORT="$2" bash vllm_server/launch.sh; }
stop() {
  for engine in transformers vllm; do VLLM_LABEL="$label-$engine" bash vllm_server/stop.sh >&2 || true; done
}
trap stop EXIT
load() { "$PYTHON" benchmarks/judge_load.py --model Judge --rounds "$rounds" "$@"; }

if [[ ! -f "$results/judge_gateway.json" || ! -f "$results/epoch-judge.json" ]]; then
  VLLM_GATEWAY=always launch transformers "$port"
  # its engine answers on a private port, as the state says (which knows of other launches too, ended ones among them)
  direct="$({ bash vllm_server/status.sh --json || true; } | "$PYTHON" -c '
import json, sys
print(next(row["url"] for row in json.load(sys.stdin) if row["label"] == sys.argv[1] and row["engine"] == "transformers"))
' "$label-transformers")"
  [[ -f "$results/judge_gateway.json" ]] || load --target "direct=$direct" --target "gateway=http://127.0.0.1:$port" --compare gateway/direct \
    --concurrency 1 16 64 --pairs "$pairs" --output "$results/judge_gateway.json"
  # An untrained judge leaves many questions without Yes and No, that is images without a score; the time is the same.
  "$PYTHON" benchmarks/epoch.py --preset toy --batch 8 --repeats 3 --config.train.max_missing_reward_fraction=1.0 --judge "http://127.0.0.1:$port" --judge-model Judge \
    --output "$results/epoch-judge.json"
  stop
fi
"$PYTHON" scripts/plan_gpus.py --check --epoch "$results/epoch-judge.json" --judge-load "$results/judge_gateway.json" \
  --judge-target gateway | tee "$results/plan_check.txt"

if [[ ! -f "$results/judge_engines.json" ]]; then
  if [[ -x "${VLLM_PYTHON:-$repo/.venv-vllm/bin/python}" ]]; then
    launch transformers "$port"
    OMP_NUM_THREADS=1 launch vllm "$((port + 1))"
    load --target "transformers=http://127.0.0.1:$port" --target "vllm=http://127.0.0.1:$((port + 1))" \
      --concurrency 1 4 16 64 --pairs "$((pairs / 8 > 64 ? pairs / 8 : 64))" --output "$results/judge_engines.json"
  else
    echo "no environment of vLLM (setup.sh --vllm): the engines are not compared" >&2
  fi
fi
