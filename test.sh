#!/usr/bin/env bash
# The whole test suite; installs on first use.
#   bash test.sh            default, 10 to 15 minutes on 2 cores
#   bash test.sh --fast     4 to 7 minutes
#   bash test.sh --all      at most 60 minutes: also the server's own environment, each subproject installed alone,
#                           real vLLM, and one whole quickstart
# Further arguments go to pytest: bash test.sh -k schedule PaCo-GRPO
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$repo"

depth=default
declare -a extra=()
for argument in "$@"; do
    case "$argument" in
        --fast) depth=fast ;;
        --all) depth=all ;;
        -h | --help) sed -n '2,8p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
        *) extra+=("$argument") ;;
    esac
done

if [[ $depth == all ]]; then bash setup.sh --vllm; else bash setup.sh; fi

# Two workers on one thread each use two cores better than two threads do; and the same settings on any machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
run=("$repo/.venv/bin/python" -m pytest -c "$repo/pyproject.toml" --rootdir "$repo" -q --tb=short)  # short: CI cuts long reports before the reason
case $depth in
    fast) together="not slow and not long and not alone"; alone="" ;;
    default) together="not long and not alone"; alone="alone and not long" ;;
    all) together="not alone"; alone="alone" ;;
esac

# pytest's exit status 5 (nothing collected) is a failure except where a selection may rightly be empty.
status=0
"${run[@]}" -n 2 --dist worksteal -m "$together" "${extra[@]}" </dev/null || status=$?
if [[ $status -eq 5 && ${#extra[@]} -gt 0 ]]; then status=0; fi
if [[ -n "$alone" && $status -ne 2 ]]; then
    second=0
    "${run[@]}" -p no:xdist -m "$alone" "${extra[@]}" </dev/null || second=$?
    if [[ $second -ne 0 && $second -ne 5 ]]; then status=$second; fi
fi
exit "$status"
