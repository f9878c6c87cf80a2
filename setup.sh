#!/usr/bin/env bash
# One environment for both subprojects and the quickstart.
#   bash setup.sh            .venv: training, evaluation, tests
#   bash setup.sh --vllm     also .venv-vllm: the reward server, and the benchmarks with vLLM
#   bash setup.sh --check    report what is installed and what is missing; change nothing
# PYTHON=/path/to/python3.12 bash setup.sh   chooses the interpreter (3.11 or 3.12).
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
else
    # An environment that is already there keeps its interpreter.
    candidates=("$repo/.venv/bin/python" python3 python3.12 python3.11 python)
fi
seen=""
for candidate in "${candidates[@]}"; do
    version="$(version_of "$candidate")"
    if [[ "$version" == 3.11 || "$version" == 3.12 ]]; then
        exec "$candidate" "$repo/tools/environment.py" "$@"
    fi
    [[ -n "$version" ]] && seen+=" $candidate=$version"
done
echo "setup: PaCo-RL needs Python 3.11 or 3.12 (found:${seen:- none})." >&2
echo "       Install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv) or name it: PYTHON=/path/to/python3.12 bash setup.sh" >&2
exit 1
