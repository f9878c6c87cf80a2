#!/usr/bin/env bash
# Run a reward in a separate environment, behind HTTP:
#   bash scripts/reward_service.sh NAME [--port 8101] [--device cuda] …
#
# NAME is a reward (imagereward, ocr, edit_score, subfig_dreamsim, …). Its requirements are in
# scripts/reward_environments/NAME.txt; its environment is created once, as .venv-reward-NAME in the
# repository. The other arguments go to the service (python -m paco_grpo.rewards.remote.service
# --help). A run uses it with
#   --config.train.reward_fn_kwargs.NAME.server=http://127.0.0.1:8101
#
#   PYTHON              interpreter of the environment (default: the activated one, the repository's
#                       .venv, or python3)
#   REWARD_ENVIRONMENT  folder of the environment (default: .venv-reward-NAME in the repository)
#   REWARD_SERVICE_KEY  required of every request; needed when --host opens the service to others
#                       (default: none)
#
# Example:  bash scripts/reward_service.sh ocr --port 8101 --device cuda
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/python.sh"
show_help "${BASH_SOURCE[0]}" "$@"

if (($# == 0)) || [[ "$1" == -* ]]; then
  echo "usage: bash scripts/reward_service.sh NAME [--port 8101] [--device cuda] …;" \
    "--help says more" >&2
  exit 2
fi
name="$1"
shift
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repo="$(cd "$scripts/../.." && pwd)"
export PYTHONPATH="$repo/PaCo-GRPO:$repo/PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
requirements="$scripts/reward_environments/$name.txt"
if [[ ! -f "$requirements" ]]; then
  {
    echo "error: there is no $requirements; in an environment that has the package of reward $name,"
    echo "       run: PYTHONPATH=$PYTHONPATH" \
      "python -m paco_grpo.rewards.remote.service --reward $name"
  } >&2
  exit 2
fi

choose_python
uv="$(command -v uv || echo "$repo/.venv/bin/uv")"
if [[ ! -x "$uv" ]]; then
  echo "error: uv is needed to create the environment; run bash setup.sh in $repo" >&2
  exit 2
fi
# uv gets the mirror and the certificate that pip is configured for.
if [[ -n "${PIP_INDEX_URL:-}" ]]; then
  export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
fi
if [[ -n "${PIP_CERT:-}" ]]; then
  export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
fi

environment="${REWARD_ENVIRONMENT:-$repo/.venv-reward-$name}"
# Packages whose dependencies the reward does not use.
no_deps="$scripts/reward_environments/$name.no-deps.txt"
[[ -f "$no_deps" ]] || no_deps=/dev/null
stamp="$(cat "$requirements" "$no_deps" "$scripts/reward_environments/base.txt" | cksum)"
if [[ "$(cat "$environment/.ready" 2>/dev/null || true)" != "$stamp" ]]; then
  echo "creating $environment (once) with $PYTHON ($PYTHON_FROM)" >&2
  install=("$uv" pip install --quiet --python "$environment/bin/python")
  "$uv" venv --quiet --clear --python "$PYTHON" "$environment"
  "${install[@]}" -r "$requirements"
  if [[ "$no_deps" != /dev/null ]]; then
    "${install[@]}" --no-deps -r "$no_deps"
  fi
  echo "$stamp" >"$environment/.ready"
fi
exec "$environment/bin/python" -m paco_grpo.rewards.remote.service --reward "$name" "$@"
