#!/usr/bin/env bash
# The whole test suite; installs on first use.
#   bash test.sh            everything that takes seconds
#   bash test.sh --fast     without tests that start processes or train
#   bash test.sh --all      also the server's environment, each subproject installed alone, real
#                           vLLM, and one whole quickstart
# Further arguments go to pytest: bash test.sh -k schedule PaCo-GRPO
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

together="not long"
alone="" # these tests get the machine for themselves after the others
setup=()
extra=()
for argument in "$@"; do
    case "$argument" in
        --fast)
            together="not slow and not long"
            ;;
        --all)
            together="not alone"
            alone="alone"
            setup=(--vllm)
            ;;
        -h | --help)
            sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' test.sh
            exit 0
            ;;
        *) extra+=("$argument") ;;
    esac
done
bash setup.sh "${setup[@]}"

# Two workers on one thread each use two cores better than two threads do; and the settings are the
# same on any machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# run ARGUMENT …    Sets `status` to pytest's exit status. 5, nothing collected, is right for one
# selection but not for all.
status=5
run() {
    local result=0
    .venv/bin/python -m pytest -c pyproject.toml --rootdir . -q --tb=short "$@" "${extra[@]}" \
        </dev/null || result=$?
    if [[ $result -ne 5 && ($result -ne 0 || $status -eq 5) ]]; then
        status=$result
    fi
}

run -n 2 --dist worksteal -m "$together"
if [[ -n "$alone" && $status -ne 2 ]]; then
    run -p no:xdist -m "$alone"
fi
exit "$status"
