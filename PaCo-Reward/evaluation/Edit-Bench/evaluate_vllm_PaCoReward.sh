#!/usr/bin/env bash
# EditReward-Bench: bash evaluate_vllm_PaCoReward.sh [--model X …]        (all options: --help)
# PYTHON chooses the interpreter. Default: the activated environment, else the repository's .venv-vllm for vLLM in this
# process, .venv for the other engines.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPO="$HERE/../../.."
source "$REPO/tools/python.sh"
if [[ -z "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" && -x "$REPO/.venv-vllm/bin/python" ]]; then
    PYTHON="$REPO/.venv-vllm/bin/python"
    for argument in "$@"; do
        case "$argument" in transformers | --engine=transformers | --server | --server=*) PYTHON="" ;; esac
    done
fi
choose_python PIL
echo "evaluate: with $PYTHON" >&2
exec "$PYTHON" "$HERE/evaluation.py" "$@"
