#!/usr/bin/env bash
# Start scripts/train.py on what this machine has:  bash scripts/launch.sh --config FILE[:NAME] [--config.a.b=value …]
#
#   NUM_PROCESSES      processes on this machine (default: the visible GPUs, or 1 on a CPU)
#   ACCELERATE_CONFIG  one of scripts/accelerate_configs, or your own; accelerate launch is then used, and a number of
#                      processes that the file states counts unless NUM_PROCESSES is set
#   NNODES             machines (default 1). With more, start the same command on each of them with
#   NODE_RANK          its number, 0 to NNODES-1, and the same
#   MASTER_ADDR        name or address of machine 0, and MASTER_PORT (default 29500), where it can be reached
#   MAIN_PROCESS_PORT  another name of MASTER_PORT; on one machine, what two runs on different GPUs must not share
#   PYTHON             interpreter (default: the activated environment, the repository's .venv, or python3)
#   OMP_NUM_THREADS    CPU threads per process (default: cores / processes)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds until processes that were asked to stop are killed (default 600)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ../tools/python.sh
choose_python paco_grpo accelerate

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
fi
if ((gpus > 0)); then default=$gpus; else default=1; fi
processes="${NUM_PROCESSES:-$default}"
if ! [[ "$processes" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: NUM_PROCESSES=$processes is not a positive integer" >&2
  exit 2
fi
if ((gpus > 0 && processes > gpus)); then
  echo "error: NUM_PROCESSES=$processes, but $gpus GPU(s) are visible; lower it, or hide the GPUs with CUDA_VISIBLE_DEVICES=" >&2
  exit 2
fi

nodes="${NNODES:-1}"
if ! [[ "$nodes" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: NNODES=$nodes is not a positive integer" >&2
  exit 2
fi
if ((nodes > 1)); then
  rank="${NODE_RANK:-}"
  if ! [[ "$rank" =~ ^[0-9]+$ ]] || ((rank >= nodes)); then
    echo "error: NNODES=$nodes needs NODE_RANK from 0 to $((nodes - 1)), another one on each machine; got '$rank'" >&2
    exit 2
  fi
  if [[ -z "${MASTER_ADDR:-}" ]]; then
    echo "error: NNODES=$nodes needs MASTER_ADDR, the name or address of machine 0" >&2
    exit 2
  fi
fi

if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
  cores="$(nproc)"
  OMP_NUM_THREADS=$((cores / processes > 0 ? cores / processes : 1))
  export OMP_NUM_THREADS
fi
# A fragmented pool of GPU memory fails an allocation that would fit: segments that grow cannot be fragmented so.
((gpus == 0)) || export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# torchrun and accelerate kill after 30 s; an update that has begun and a checkpoint of 4 GB take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
echo "launch: $processes process(es) on $( ((gpus > 0)) && echo "$gpus GPU(s)" || echo "the CPU"), OMP_NUM_THREADS=$OMP_NUM_THREADS," \
  "PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-}, with $PYTHON ($PYTHON_FROM)" >&2

launch=("$PYTHON" -m accelerate.commands.launch)
port="${MASTER_PORT:-${MAIN_PROCESS_PORT:-29500}}"
if ((nodes > 1)); then
  # Every machine states the processes of all, so each must have as many.
  ((gpus > 0)) || export ACCELERATE_USE_CPU=true
  exec "${launch[@]}" --config_file "${ACCELERATE_CONFIG:-scripts/accelerate_configs/multi_node.yaml}" \
    --num_machines "$nodes" --machine_rank "$rank" --num_processes "$((processes * nodes))" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$port" scripts/train.py "$@"
elif [[ -n "${ACCELERATE_CONFIG:-}" ]]; then
  arguments=(--config_file "$ACCELERATE_CONFIG")
  if [[ -n "${NUM_PROCESSES:-}" ]] || ! grep -q '^num_processes:' "$ACCELERATE_CONFIG"; then
    arguments+=(--num_processes "$processes")
  fi
  exec "${launch[@]}" "${arguments[@]}" scripts/train.py "$@"
elif ((processes == 1)); then
  # One process needs no launcher between us and it, and signals then reach it directly.
  ((gpus > 0)) || export ACCELERATE_USE_CPU=true
  exec "$PYTHON" scripts/train.py "$@"
elif ((gpus > 0)); then
  exec "${launch[@]}" --config_file scripts/accelerate_configs/multi_gpu.yaml \
    --num_processes "$processes" --main_process_port "$port" scripts/train.py "$@"
else
  # accelerate launch wants MPI for several CPU processes; torchrun gives it gloo.
  export ACCELERATE_USE_CPU=true
  exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$processes" scripts/train.py "$@"
fi
