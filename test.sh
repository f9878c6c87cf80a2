#!/usr/bin/env bash
# The whole test suite; installs on first use.
#   bash test.sh            everything that takes seconds
#   bash test.sh --fast     without tests that start processes or train
#   bash test.sh --all      also the server's environment, each subproject installed alone, real vLLM, and one whole quickstart
# Further arguments go to pytest: bash test.sh -k schedule PaCo-GRPO
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

together="not long and not alone" alone="alone and not long" setup=() extra=()
for argument in "$@"; do
    case "$argument" in
        --fast) together="not slow and not long and not alone" alone="" ;;
        --all) together="not alone" alone="alone" setup=(--vllm) ;;
        -h | --help) sed -n '2,6p' test.sh | sed 's/^# \{0,1\}//'; exit 0 ;;
        *) extra+=("$argument") ;;
    esac
done
bash setup.sh "${setup[@]}"

# Two workers on one thread each use two cores better than two threads do; and the same settings on any machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
status=5
run() {  # ARGUMENT…    pytest's exit status 5, nothing collected, is right for one selection but not for all.
    local found=0
    .venv/bin/python -m pytest -c pyproject.toml --rootdir . -q --tb=short "$@" "${extra[@]}" </dev/null || found=$?
    [[ $found -eq 5 || ($found -eq 0 && $status -ne 5) ]] || status=$found
}
run -n 2 --dist worksteal -m "$together"
[[ -z "$alone" || $status -eq 2 ]] || run -p no:xdist -m "$alone"
exit "$status"
