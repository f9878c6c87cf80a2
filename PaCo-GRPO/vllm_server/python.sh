# Sourced by the scripts next to it: runs a module of vllm_server with $PYTHON, the repository's .venv, or python3.
run_module() {
  local here repo python
  here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  repo="$(cd "$here/../.." && pwd)"
  python="${PYTHON:-$repo/.venv/bin/python}"
  if [[ -z "${PYTHON:-}" && ! -x "$python" ]]; then python=python3; fi
  PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m "vllm_server.$1" "${@:2}"
}
