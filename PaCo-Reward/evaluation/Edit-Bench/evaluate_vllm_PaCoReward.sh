#!/usr/bin/env bash
# EditReward-Bench: bash evaluate_vllm_PaCoReward.sh [--model X …]        (all options: --help)
# PYTHON chooses the interpreter. Default: the repository's .venv-vllm for vLLM in this process, .venv for the other
# engines or without .venv-vllm, else python3.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-}"
if [[ -z "$PYTHON" ]]; then
    environments=(.venv-vllm .venv)
    for argument in "$@"; do
        case "$argument" in transformers | --engine=transformers | --server | --server=*) environments=(.venv) ;; esac
    done
    PYTHON=python3
    for environment in "${environments[@]}"; do
        [[ -x "$HERE/../../../$environment/bin/python" ]] || continue
        PYTHON="$HERE/../../../$environment/bin/python"
        break
    done
fi

"$PYTHON" -c 'import paco_judge' 2>/dev/null || {
    echo "error: paco_judge is not installed for $PYTHON; run: bash setup.sh (in the repository's root)" >&2
    exit 2
}
exec "$PYTHON" "$HERE/evaluation.py" "$@"
