# Sourced by run.sh and editing.sh.

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$repo/quickstart/out"
seed=0 fresh="" stages=0 child="" overrides=()

# begin ARGUMENT …    Reads the arguments, prepares the environment and the folder `out`; results of the same settings are kept.
begin() {
    while [[ $# -gt 0 ]]; do
        case "$1" in
            --seed=* | --minutes=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
            --seed) seed="${2:-}"; (($# < 2)) || shift ;;
            --minutes) minutes="${2:-}"; (($# < 2)) || shift ;;
            --fresh) fresh=yes ;;
            --config.*=*) overrides+=("$1") ;;
            -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
            *) echo "$(basename "$0"): unknown argument $1; see --help" >&2; exit 2 ;;
        esac
        shift
    done
    [[ "$seed" =~ ^[0-9]+$ ]] || { echo "--seed must be a whole number, not '$seed'" >&2; exit 2; }
    [[ "$minutes" =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "--minutes must be a number, not '$minutes'" >&2; exit 2; }

    bash "$repo/setup.sh"
    source "$repo/tools/python.sh" # glibc's settings
    export PATH="$repo/.venv/bin:$PATH" PYTHON="$repo/.venv/bin/python" VIRTUAL_ENV="$repo/.venv"
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    # Two processes of one thread use two cores better than one process of two threads; on GPUs the scripts decide.
    command -v nvidia-smi >/dev/null || export NUM_PROCESSES="${NUM_PROCESSES:-$(($(nproc) > 1 ? 2 : 1))}"
    mkdir -p "$out"
    exec 9>"$repo/quickstart/.quickstart.lock"
    flock -n 9 || { echo "another quickstart is running in this clone; wait for it or end it" >&2; exit 1; }
    trap 'echo; echo "interrupted; run it again to continue" >&2; exit 130' INT TERM HUP
    trap end EXIT
    local settings
    settings="$(printf '%s\n' "$seed" "$minutes" "${overrides[@]}" |
        cat - "$repo"/PaCo-GRPO/config/*.py "$repo"/PaCo-Reward/config/toy_*.yaml | sha256sum)"
    if [[ -n "$fresh" || "$(cat "$done_file.settings" 2>/dev/null)" != "$settings" ]]; then
        [[ -n "$fresh" || ! -e "$done_file" ]] || echo "other settings or configurations than last time: starting over"
        discard
        mkdir -p "$out"
        rm -f "$done_file"
        echo "$settings" >"$done_file.settings"
    fi
    touch "$done_file"
}

# end    Ends what is still running; run.sh and editing.sh add to it in `cleanup`.
end() {
    local status=$?
    trap '' INT TERM HUP
    [[ -z "$child" ]] || { kill "$child" 2>/dev/null && wait "$child" 2>/dev/null || true; }
    cleanup
    exit "$status"
}

# stage NAME MINUTES TITLE    Prints the heading; false if the stage is done.
stage() {
    stages=$((stages + 1)) name="$1" began=$SECONDS
    printf '\n[%d/%d] %s' "$stages" "$total" "$3"
    if grep -q "^$name " "$done_file"; then echo ": done before"; return 1; fi
    echo ", about $2 min"
}

finish() { echo "$name $((SECONDS - began))" >>"$done_file"; }

# run FOLDER LOG COMMAND …    Runs a command with a progress bar; a failure shows its last lines and ends everything.
run() {
    (cd "$repo/$1" && exec "$PYTHON" -m paco_toy.progress "$out/logs/$2.log" "${@:3}") 9>&- &
    child=$!
    wait "$child"
    child=""
}

# report RUN TITLE OPTION …    The last stage: summary and report of the training in `out`/RUN, and where they are.
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
