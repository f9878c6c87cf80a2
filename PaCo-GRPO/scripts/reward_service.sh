#!/usr/bin/env bash
# Run a reward in a separate environment, behind HTTP:  bash scripts/reward_service.sh NAME [--port 8101] [--device cuda] …
#
# NAME is a reward (imagereward, ocr, edit_score, subfig_dreamsim, …). Its requirements are in
# scripts/reward_environments/NAME.txt; its environment is created once, as .venv-reward-NAME in the repository. The other
# arguments go to the service (python -m paco_grpo.rewards.remote.service --help). A run uses it with
#   --config.train.reward_fn_kwargs.NAME.server=http://127.0.0.1:8101
#
#   PYTHON              interpreter of the environment (default: the activated one, the repository's .venv, or python3)
#   REWARD_ENVIRONMENT  folder of the environment (default: .venv-reward-NAME in the repository)
#   REWARD_SERVICE_KEY  required of every request; needed when --host opens the service to others (default: none)
#
# Example:  bash scripts/reward_service.sh ocr --port 8101 --device cuda
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/python.sh"
show_help "${BASH_SOURCE[0]}" "$@"

if (($# == 0)) || [[ "$1" == -* ]]; then
  echo "usage: bash scripts/reward_service.sh NAME [--port 8101] [--device cuda] …; --help says more" >&2
  exit 2
fi
name="$1"
shift
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repo="$(cd "$scripts/../.." && pwd)"
export PYTHONPATH="$repo/PaCo-GRPO:$repo/PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
requirements="$scripts/reward_environments/$name.txt"
if [[ ! -f "$requirements" ]]; then
  echo "error: there is no $requirements; in an environment that has the package of reward $name," >&2
  echo "       run: PYTHONPATH=$PYTHONPATH python -m paco_grpo.rewards.remote.service --reward $name" >&2
  exit 2
fi

choose_python
uv="$(command -v uv || echo "$repo/.venv/bin/uv")"
[[ -x "$uv" ]] || { echo "error: uv is needed to create the environment; run bash setup.sh in $repo" >&2; exit 2; }
[[ -z "${PIP_INDEX_URL:-}" ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[[ -z "${PIP_CERT:-}" ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"

environment="${REWARD_ENVIRONMENT:-$repo/.venv-reward-$name}"
no_deps="$scripts/reward_environments/$name.no-deps.txt"  # packages whose dependencies the reward does not use
[[ -f "$no_deps" ]] || no_deps=/dev/null
stamp="$(cat "$requirements" "$no_deps" "$scripts/reward_environments/base.txt" | cksum)"
if [[ "$(cat "$environment/.ready" 2>/dev/null || true)" != "$stamp" ]]; then
  echo "creating $environment (once) with $PYTHON ($PYTHON_FROM)" >&2
  "$uv" venv --quiet --clear --python "$PYTHON" "$environment"
  "$uv" pip install --quiet --python "$environment/bin/python" -r "$requirements"
  [[ "$no_deps" == /dev/null ]] || "$uv" pip install --quiet --no-deps --python "$environment/bin/python" -r "$no_deps"
  echo "$stamp" >"$environment/.ready"
fi
exec "$environment/bin/python" -m paco_grpo.rewards.remote.service --reward "$name" "$@"
