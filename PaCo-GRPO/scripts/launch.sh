#!/usr/bin/env bash
# Start scripts/train.py on this machine's GPUs:
#   bash scripts/launch.sh --config FILE[:NAME] [--config.a.b=value …]
# or another program, such as the evaluation:
#   bash scripts/launch.sh scripts/evaluate.py --config FILE[:NAME] …
# FILE is a path from the folder where you type this, or from PaCo-GRPO.
#
#   NUM_PROCESSES      processes on this machine (default: the visible GPUs, or 1 on a CPU)
#   NNODES             machines (default 1). With more, start the same command on each of them with
#   NODE_RANK          its number, 0 to NNODES-1, and the same
#   MASTER_ADDR        name or address of machine 0, and MASTER_PORT (or MAIN_PROCESS_PORT, default
#                      29500)
#   ACCELERATE_CONFIG  a file written by `accelerate config`: accelerate launch then starts the
#                      processes, not torchrun
#   ACCELERATE_USE_CPU true = train on the CPU although there are GPUs that torch does not see
#   PYTHON             interpreter (default: the activated environment, the repository's .venv, or
#                      python3)
#   OMP_NUM_THREADS    CPU threads per process (default: cores / processes)
#   TORCHINDUCTOR_COMPILE_THREADS
#                      processes that compile kernels, of each process (default: cores / processes,
#                      at most 8)
#
# Example:  NUM_PROCESSES=4 bash scripts/launch.sh --config config/grpo.py:t2is --config.seed=1
# Options:  ../docs/configuration.md, and bash scripts/launch.sh --config config/grpo.py:t2is --help
set -euo pipefail
typed_in="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ../tools/python.sh
show_help scripts/launch.sh "$@"
choose_python paco_grpo accelerate  # sets PYTHON to one that has these packages

fail() {
  echo "error: $*" >&2
  exit 2
}

program=scripts/train.py
if [[ "${1:-}" == *.py ]]; then
  program="$1"
  shift
fi
[[ -f "$program" ]] || fail "there is no program $program (looked from $PWD)"

# A configuration file is looked for where the command was typed, then here.
arguments=()
previous=""
for argument in "$@"; do
  if [[ "$previous" == --config || "$argument" == --config=* ]]; then
    file="${argument#--config=}"
    if [[ "$file" != /* && ! . -ef "$typed_in" && -f "$typed_in/${file%%:*}" ]]; then
      argument="${argument%"$file"}$typed_in/$file"
    fi
  fi
  arguments+=("$argument")
  previous="$argument"
done

gpus=0
if command -v nvidia-smi >/dev/null; then
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
fi
processes="${NUM_PROCESSES:-$((gpus > 0 ? gpus : 1))}"
nodes="${NNODES:-1}"
rank="${NODE_RANK:-}"
port="${MASTER_PORT:-${MAIN_PROCESS_PORT:-29500}}"
[[ "$processes" =~ ^[1-9][0-9]{0,3}$ ]] ||
  fail "NUM_PROCESSES=$processes is not a positive number of processes"
((gpus == 0 || processes <= gpus)) ||
  fail "NUM_PROCESSES=$processes, but torch sees $gpus GPU(s); lower it"
[[ "$nodes" =~ ^[1-9][0-9]{0,3}$ ]] || fail "NNODES=$nodes is not a positive number of machines"
[[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] || fail "MASTER_PORT=$port is not a port"
if ((nodes > 1)); then
  if [[ ! "$rank" =~ ^(0|[1-9][0-9]{0,3})$ ]] || ((rank >= nodes)); then
    fail "NNODES=$nodes needs NODE_RANK from 0 to $((nodes - 1)), another one on each machine;" \
      "got '$rank'"
  fi
  [[ -n "${MASTER_ADDR:-}" ]] ||
    fail "NNODES=$nodes needs MASTER_ADDR, the name or address of machine 0"
fi

# nproc would count threads: on many clusters OMP_NUM_THREADS is 1.
cores="$(($(env -u OMP_NUM_THREADS nproc) / processes))" # of each process
cores="$((cores > 0 ? cores : 1))"
compilers="$((cores < 8 ? cores : 8))" # torch's default is up to 32 in each process
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$compilers}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# torchrun kills after 30 s; an update that has begun and a checkpoint of 4 GB take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
if ((gpus > 0)); then
  # Expandable segments avoid fragmentation of GPU memory.
  export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
fi
echo "launch: $nodes machine(s), here $processes process(es), $gpus GPU(s)," \
  "OMP_NUM_THREADS=$OMP_NUM_THREADS," \
  "TORCHINDUCTOR_COMPILE_THREADS=$TORCHINDUCTOR_COMPILE_THREADS, $PYTHON ($PYTHON_FROM)" >&2

if [[ -n "${ACCELERATE_CONFIG:-}" ]]; then
  [[ -f "$ACCELERATE_CONFIG" ]] ||
    fail "ACCELERATE_CONFIG=$ACCELERATE_CONFIG is not a file (looked from $PWD)"
  launch=(-m accelerate.commands.launch --config_file "$ACCELERATE_CONFIG")
  launch+=(--main_process_port "$port")
  # A number of processes in the file counts unless NUM_PROCESSES is set.
  if [[ -n "${NUM_PROCESSES:-}" ]] || ! grep -q '^num_processes:' "$ACCELERATE_CONFIG"; then
    launch+=(--num_processes $((processes * nodes)))
  fi
  if ((nodes > 1)); then
    launch+=(--num_machines "$nodes" --machine_rank "$rank" --main_process_ip "$MASTER_ADDR")
  fi
elif ((nodes > 1)); then
  launch=(-m torch.distributed.run --nnodes "$nodes" --node-rank "$rank")
  launch+=(--master-addr "$MASTER_ADDR" --master-port "$port" --nproc-per-node "$processes")
elif ((processes > 1)); then
  launch=(-m torch.distributed.run --standalone --nproc-per-node "$processes")
else
  launch=() # one process gets signals directly
fi
exec "$PYTHON" "${launch[@]}" "$program" "${arguments[@]}"
