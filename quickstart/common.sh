# shellcheck shell=bash
# Sourced by run.sh and editing.sh. They set `minutes`, `total`, `out` and `training` (the folder of
# the RL run in `out`), and define `cleanup`, before they call `begin`.

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$repo/quickstart/out"
seed=0
fresh=""
overrides=()
stages=0
child=""
START_OVER="--fresh deletes it and starts over, or move it away"

# begin CONFIGURATION ARGUMENT …    Reads and checks the arguments, then prepares the environment
# and the folder `out`.
begin() {
    local configuration="$1"
    shift
    read_arguments "$@"
    choose_device

    bash "$repo/setup.sh"
    source "$repo/tools/python.sh" # glibc's settings
    export VIRTUAL_ENV="$repo/.venv" PYTHON="$repo/.venv/bin/python" PATH="$repo/.venv/bin:$PATH"
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    # Options are read before anything is computed or deleted.
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

# lock    Refuses a second quickstart in this clone. The commands of a stage hold the lock, too:
# what a killed quickstart left is named instead of being started a second time.
lock() {
    lock_file="$repo/quickstart/.quickstart.lock"
    exec 9>>"$lock_file"
    if ! flock -n 9; then
        echo "a quickstart in this clone has not ended: wait for it, or end process" \
            "$(tail -n 1 "$lock_file")" >&2
        exit 1
    fi
    echo "$$ (bash)" >"$lock_file"
}

# prepare_out    Makes the folder `out`, and refuses to continue what was begun with other settings.
# With other --minutes, the training goes on.
prepare_out() {
    local data options
    done_file="$out/done"
    data="$({ echo "$seed" && cat "$repo"/PaCo-Reward/config/toy_*.yaml; } | sha256sum)"
    options="$({ printf '%s\n' "${overrides[@]}" && cat "$repo"/PaCo-GRPO/config/*.py; } | sha256sum)"
    mkdir -p "$out"
    touch "$done_file"
    if [[ -n "$fresh" ]]; then
        # Not what other commands or earlier versions left there.
        find "$out" -mindepth 1 -maxdepth 1 \
            -not -name editing -not -name study -not -name earlier -exec rm -rf {} +
    elif has_changed data "$data"; then
        refuse "$out is of another --seed or another configuration of the judge; $START_OVER"
    elif has_changed options "$options"; then
        refuse "$out is of other --config options or other files in PaCo-GRPO/config; $START_OVER"
    elif has_changed minutes "$minutes"; then
        sed -i '/^rl /d; /^report /d' "$done_file"
    fi
    touch "$done_file"
    printf '%s\n' "data $data" "options $options" "minutes $minutes" >"$out/settings"
}

# has_changed NAME VALUE    Whether the last run was with another value.
has_changed() {
    [[ -s "$done_file" ]] && ! grep -qsxF "$1 $2" "$out/settings"
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
    if [[ -n "$child" ]] && kill -TERM -- "-$child" 2>/dev/null; then
        timeout 60 tail --pid "$child" -f /dev/null || true # a trainer finishes its batch and saves
        kill -KILL -- "-$child" 2>/dev/null || true
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

# run FOLDER LOG COMMAND …    Runs a command with its output in a log, whose last line is shown. A
# failure shows its last lines and ends everything.
run() {
    local log="$out/logs/$2.log" start=$SECONDS status=0
    mkdir -p "$out/logs"
    # In a process group of its own, so that all of it can be ended.
    (cd "$repo/$1" && exec setsid "${@:3}") </dev/null >"$log" 2>&1 &
    child=$!
    echo "$child ($2, log: $log)" >>"$lock_file"
    while [[ -t 1 ]] && kill -0 "$child" 2>/dev/null; do
        show "$2  $((SECONDS - start)) s  $(last_lines 1 "$log")"
        sleep 0.5
    done
    wait "$child" || status=$?
    child=""
    show "$2: $((SECONDS - start)) s"$'\n'
    if [[ $status -ne 0 ]]; then
        echo "$2 failed with status $status:" >&2
        last_lines 12 "$log" | sed 's/^/  | /' >&2
        echo "The whole log: $log" >&2
        exit "$status"
    fi
}

# last_lines NUMBER LOG    The last lines that are not blank. Progress bars write over their line.
last_lines() {
    tail -c 4000 "$2" | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n "$1" || true
}

# show TEXT    On a terminal, in place of the last line.
show() {
    local clear=""
    if [[ -t 1 ]]; then
        clear=$'\r\033[2K'
    fi
    printf '%s      %s' "$clear" "${1:0:$(($(tput cols 2>/dev/null || echo 100) - 8))}"
}

# report RUN TITLE    The last stage: summary and report of the training in `out`/RUN, and where
# they are.
report() {
    if stage report 0.3 "Report"; then
        run quickstart "$stages-summary" python -m paco_toy.summary "$out" "$1" --seed "$seed"
        run quickstart "$stages-report" python -m paco_toy.report "$out" "$1" "$2"
        finish
    fi
    echo
    cat "$out/summary.txt"
    echo "Numbers: $out/summary.json"
    echo "Report:  $out/report.html"
}
