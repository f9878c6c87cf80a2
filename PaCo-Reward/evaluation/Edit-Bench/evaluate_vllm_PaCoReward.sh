#!/usr/bin/env bash
# EditReward-Bench: bash evaluate_vllm_PaCoReward.sh [--model X …]        (all options: --help)
# PYTHON chooses the interpreter (default: the repository's .venv, else python3).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-}"
if [[ -z "$PYTHON" ]]; then
    PYTHON="$HERE/../../../.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON=python3
fi

"$PYTHON" -c 'import paco_judge' 2>/dev/null || {
    echo "error: paco_judge is not installed for $PYTHON; run: bash setup.sh (in the repository's root)" >&2
    exit 2
}
exec "$PYTHON" "$HERE/evaluation.py" "$@"
