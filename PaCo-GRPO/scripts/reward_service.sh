#!/usr/bin/env bash
# Run a reward in an environment of its own, behind HTTP:  bash scripts/reward_service.sh NAME [--port 8101] [--device cuda] …
#
# NAME is a reward (imagereward, ocr, edit_score, subfig_dreamsim, …). What its environment needs is in
# scripts/reward_environments/NAME.txt; it is made once, in .venv-reward-NAME of the repository. The other arguments go to
# the service (python -m paco_grpo.rewards.remote.service --help). The run then asks it:
#   --config.train.reward_fn_kwargs.NAME.server=http://127.0.0.1:8101
#
#   PYTHON              interpreter of the environment (default: the repository's .venv, else python3)
#   REWARD_SERVICE_KEY  wanted of every request; needed when --host opens the service to others
set -euo pipefail

if (($# == 0)) || [[ "$1" == -* ]]; then
  sed -n '2,11p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
  exit 2
fi
name="$1"
shift
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repo="$(cd "$scripts/../.." && pwd)"
wanted="$scripts/reward_environments/$name.txt"
if [[ ! -f "$wanted" ]]; then
  known="$(cd "$scripts/reward_environments" && ls ./*.txt | grep -v -e base.txt -e no-deps | sed 's|^./||; s|.txt$||' | paste -sd ' ')"
  echo "error: no environment is known for reward $name (known: $known); in an environment that has its package," >&2
  echo "       run: PYTHONPATH=$repo/PaCo-GRPO:$repo/PaCo-Reward/judge python -m paco_grpo.rewards.remote.service --reward $name" >&2
  exit 2
fi

python="${PYTHON:-$repo/.venv/bin/python}"
[[ -x "$python" || -n "${PYTHON:-}" ]] || python=python3
uv="$(command -v uv || true)"
[[ -n "$uv" ]] || uv="$repo/.venv/bin/uv"
if [[ ! -x "$uv" ]]; then
  echo "error: uv is needed to make the environment; run bash setup.sh in $repo" >&2
  exit 2
fi
[[ -z "${PIP_INDEX_URL:-}" ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[[ -z "${PIP_CERT:-}" ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"

environment="${REWARD_ENVIRONMENT:-$repo/.venv-reward-$name}"
alone="$scripts/reward_environments/$name.no-deps.txt"  # packages whose dependencies the reward does not use
[[ -f "$alone" ]] || alone=/dev/null
stamp="$(cat "$wanted" "$alone" "$scripts/reward_environments/base.txt" | cksum)"
if [[ "$(cat "$environment/.ready" 2>/dev/null || true)" != "$stamp" ]]; then
  echo "making $environment (once)" >&2
  "$uv" venv --quiet --clear --python "$python" "$environment"
  "$uv" pip install --quiet --python "$environment/bin/python" -r "$wanted"
  [[ "$alone" == /dev/null ]] || "$uv" pip install --quiet --no-deps --python "$environment/bin/python" -r "$alone"
  echo "$stamp" >"$environment/.ready"
fi
export PYTHONPATH="$repo/PaCo-GRPO:$repo/PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
exec "$environment/bin/python" -m paco_grpo.rewards.remote.service --reward "$name" "$@"
