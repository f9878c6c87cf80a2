# Sourced by the scripts next to it: runs a module of vllm_server; those modules need nothing but Python.
run_module() {
  local here
  here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  source "$here/../../tools/python.sh"
  choose_python
  PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m "vllm_server.$1" "${@:2}"
}
