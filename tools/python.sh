# shellcheck shell=bash
# Sourced by scripts that start Python.

# Let glibc keep freed memory: returning it costs page faults at every step on a CPU.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-536870912}"

# show_help FILE "$@"    If the first argument is -h or --help, prints the comment at the top of
# FILE and ends.
show_help() {
  if [[ "${2:-}" == -h || "${2:-}" == --help ]]; then
    sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' "$1"
    exit 0
  fi
}

# has_modules PYTHON [MODULE …]    Whether it is Python 3.11 or newer and has the modules.
has_modules() {
  local code='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
  # -P (new in Python 3.11): a folder of that name in the working folder is not an installed
  # package.
  "$1" -P -c "$code" "${@:2}" 2>/dev/null
}

# choose_python [MODULE …]    Sets PYTHON to a Python 3.11 or newer that has the modules, and
# PYTHON_FROM to where it is from: $PYTHON if it is set, else the activated environment (conda or
# venv), the repository's .venv, or the PATH.
choose_python() {
  local repo candidate candidates python from requirement
  repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  candidates=("the repository's .venv=$repo/.venv/bin/python" "the PATH=python3")
  if [[ -n "${PYTHON:-}" ]]; then
    candidates=("PYTHON=$PYTHON")
  elif [[ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]]; then
    # Where both are set, the PATH tells which was activated last.
    python="$(command -v python || echo python)"
    candidates=("the activated environment=$python" "${candidates[@]}")
  fi
  requirement="Python 3.11 or newer${*:+ with $*}"
  for candidate in "${candidates[@]}"; do
    from="${candidate%%=*}"
    python="${candidate#*=}"
    if has_modules "$python" "$@"; then
      PYTHON="$python"
      # shellcheck disable=SC2034 # read by the scripts
      PYTHON_FROM="$from"
      return
    fi
    if [[ "$from" == "the activated environment" ]]; then
      echo "note: the activated environment ($python) is passed over: it is not $requirement" >&2
    fi
  done
  echo "error: found no $requirement (${candidates[*]}): run \`bash setup.sh\` in $repo, activate" \
    "an environment, or correct PYTHON" >&2
  return 2
}
