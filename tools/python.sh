# Sourced by scripts that start Python.

# Let glibc keep freed memory: returning it costs page faults at every step on a CPU.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-536870912}"

# show_help FILE "$@"    If the first argument is -h or --help, prints the comment at the top of FILE and ends.
show_help() {
  [[ "${2:-}" == -h || "${2:-}" == --help ]] || return 0
  sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' "$1"
  exit 0
}

# choose_python [MODULE …]    Sets PYTHON to a Python 3.11 or newer that has the modules, and PYTHON_FROM to where it is from:
# $PYTHON if it is set, else the activated environment (conda or venv), the repository's .venv, or the PATH.
choose_python() {
  local repo candidate candidates python from
  repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  candidates=("the repository's .venv=$repo/.venv/bin/python" "the PATH=python3")
  if [[ -n "${PYTHON:-}" ]]; then
    candidates=("PYTHON=$PYTHON")
  elif [[ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]]; then
    # Where both are set, the PATH tells which was activated last.
    candidates=("the activated environment=$(command -v python || echo python)" "${candidates[@]}")
  fi
  for candidate in "${candidates[@]}"; do
    from="${candidate%%=*}" python="${candidate#*=}"
    # -P (new in Python 3.11): a folder of that name in the working folder is not an installed package.
    if "$python" -P -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@" \
      2>/dev/null; then
      PYTHON="$python" PYTHON_FROM="$from"
      return
    fi
    [[ "$from" != "the activated environment" ]] ||
      echo "note: the activated environment ($python) is passed over: it is not Python 3.11 or newer${*:+ with $*}" >&2
  done
  echo "error: found no Python 3.11 or newer${*:+ with $*} (${candidates[*]}): run \`bash setup.sh\` in $repo, activate an" \
    "environment, or correct PYTHON" >&2
  return 2
}
