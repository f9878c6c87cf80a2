# shellcheck shell=bash
# Sourced by run.sh and editing.sh. They set `minutes`, `total` and `done_file` and define `cleanup`
# before they call `begin`.

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$repo/quickstart/out"
seed=0
fresh=""
overrides=()
stages=0
child=""

# begin CONFIGURATION ARGUMENT …    Reads and checks the arguments, then prepares the environment
# and the folder `out`. Results of the same settings are kept, other results are set aside.
begin() {
    local configuration="$1"
    shift
    read_arguments "$@"
    choose_device

    bash "$repo/setup.sh"
    source "$repo/tools/python.sh" # glibc's settings
    export VIRTUAL_ENV="$repo/.venv" PYTHON="$repo/.venv/bin/python" PATH="$repo/.venv/bin:$PATH"
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    # Options are read before anything is computed or set aside.
    (
        cd "$repo/PaCo-GRPO" &&
            "$PYTHON" scripts/train.py --config "config/grpo.py:$configuration" \
                "${overrides[@]}" --help >/dev/null
    ) || exit 2

    lock
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    trap 'interrupted 129' HUP
    trap end EXIT
    "$PYTHON" -m paco_toy.progress --wait-for-earlier "$repo"/quickstart/out/{,editing/}logs ||
        exit 1
    cleanup # what a killed run left
    prepare_out
}

# read_arguments ARGUMENT …    Sets seed, minutes, fresh and overrides.
read_arguments() {
    while [[ $# -gt 0 ]]; do
        case "$1" in
            --seed=* | --minutes=*)
                set -- "${1%%=*}" "${1#*=}" "${@:2}"
                continue
                ;;
            --seed)
                seed="${2:-}"
                (($# < 2)) || shift
                ;;
            --minutes)
                minutes="${2:-}"
                (($# < 2)) || shift
                ;;
            --fresh) fresh=yes ;;
            --config.*=*) overrides+=("$1") ;;
            -h | --help)
                sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' "$0"
                exit 0
                ;;
            *) refuse "unknown argument $1; see --help" ;;
        esac
        shift
    done
    [[ "$seed" =~ ^[0-9]{1,9}$ ]] ||
        refuse "--seed must be a whole number of at most nine digits, not '$seed'"
    [[ "$minutes" =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] ||
        refuse "--minutes must be a number, not '$minutes'"
    is_port "${VLLM_PORT:-1}" ||
        refuse "VLLM_PORT must be a port from 1 to 65535, not '$VLLM_PORT'"
}

is_port() {
    [[ "$1" =~ ^[0-9]{1,5}$ ]] && ((10#$1 >= 1 && 10#$1 <= 65535))
}

refuse() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

# choose_device    The CPU on every machine, so that a run has the same batch sizes and results,
# unless GPUs are asked for.
choose_device() {
    case "${QUICKSTART_DEVICE:-cpu}" in
        cpu)
            export CUDA_VISIBLE_DEVICES="" ACCELERATE_USE_CPU=true
            export VLLM_ENGINE="${VLLM_ENGINE:-transformers}"
            # Two processes of one thread use two cores better than one process of two threads.
            # nproc would count threads: on many clusters OMP_NUM_THREADS is 1.
            cores="$(env -u OMP_NUM_THREADS nproc)"
            export NUM_PROCESSES="${NUM_PROCESSES:-$((cores > 1 ? 2 : 1))}"
            if nvidia-smi -L >/dev/null 2>&1; then
                echo "The quickstart runs on the CPU; QUICKSTART_DEVICE=gpu uses this machine's" \
                    "GPUs, with other batch sizes."
            fi
            ;;
        gpu) echo "On GPUs: vLLM serves the judge, and each GPU trains a share of the images." ;;
        *) refuse "QUICKSTART_DEVICE must be cpu or gpu, not '$QUICKSTART_DEVICE'" ;;
    esac
}

# lock    Refuses a second quickstart in this clone.
lock() {
    local file="$repo/quickstart/.quickstart.lock"
    exec 9>>"$file"
    if ! flock -n 9; then
        echo "another quickstart is running in this clone (process $(cat "$file"));" \
            "wait for it or end it" >&2
        exit 1
    fi
    echo $$ >"$file"
}

# prepare_out    Makes the folder `out`, and moves results of other settings out of it.
prepare_out() {
    local settings aside
    mkdir -p "$out"
    settings="$(
        {
            printf '%s\n' "$seed" "$minutes" "${overrides[@]}"
            cat "$repo"/PaCo-GRPO/config/*.py "$repo"/PaCo-Reward/config/toy_*.yaml
        } | sha256sum
    )"
    if [[ -n "$fresh" ]]; then
        results | xargs -0 -r rm -rf
    elif [[ "$(cat "$done_file.settings" 2>/dev/null)" != "$settings" && -s "$done_file" ]]; then
        aside="$repo/quickstart/out/earlier/$(basename "$out")-$(date +%Y%m%d-%H%M%S)"
        echo "other settings or configurations than last time: starting over;" \
            "the earlier results are in $aside"
        mkdir -p "$aside"
        results | xargs -0 -r mv -t "$aside"
    fi
    mkdir -p "$out"
    echo "$settings" >"$done_file.settings"
    touch "$done_file"
}

# results    The files and folders of `out` that belong to this command, each ended by a zero byte.
results() {
    find "$out" -mindepth 1 -maxdepth 1 -not -name editing -not -name earlier -print0
}

interrupted() {
    echo
    echo "interrupted; run it again to continue" >&2
    exit "$1"
}

# end    Ends what is still running, and what `cleanup` of run.sh and editing.sh knows.
end() {
    local status=$?
    trap '' INT TERM HUP
    if [[ -n "$child" ]]; then
        kill "$child" 2>/dev/null && wait "$child" 2>/dev/null || true
    fi
    cleanup
    exit "$status"
}

# stage NAME MINUTES TITLE    Prints the heading; false if the stage is done.
stage() {
    name="$1"
    began=$SECONDS
    stages=$((stages + 1))
    printf '\n[%d/%d] %s' "$stages" "$total" "$3"
    if grep -q "^$name " "$done_file"; then
        echo ": done before"
        return 1
    fi
    echo ", about $2 min"
}

# finish    Notes that the stage is done, and how long it took.
finish() {
    echo "$name $((SECONDS - began))" >>"$done_file"
}

# run FOLDER LOG COMMAND …    Runs a command with a progress bar. A failure shows its last lines and
# ends everything.
run() {
    (
        cd "$repo/$1" || exit
        exec "$PYTHON" -m paco_toy.progress "$out/logs/$2.log" "${@:3}"
    ) 9>&- &
    child=$!
    wait "$child"
    child=""
}

# report RUN TITLE OPTION …    The last stage: summary and report of the training in `out`/RUN, and
# where they are.
report() {
    if stage report 0.3 "Report"; then
        run quickstart "$stages-summary" python -m paco_toy.summary "$out" "$1" --seed "$seed"
        run PaCo-GRPO "$stages-report" python -m paco_grpo.report "$out/$1" --title "$2" "${@:3}" \
            --out "$out/report.html"
        finish
    fi
    echo
    cat "$out/summary.txt"
    echo "Numbers: $out/summary.json"
    echo "Report:  $out/report.html"
}
