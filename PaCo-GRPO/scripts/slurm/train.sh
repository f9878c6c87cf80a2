#!/usr/bin/env bash
# Judge and training as one Slurm job, on one node or several; from PaCo-GRPO:
#   sbatch scripts/slurm/train.sh t2is --config.run_name=first
#   sbatch --nodes=2 scripts/slurm/train.sh t2is --config.run_name=two --config.save_dir=/shared/runs
#
# The judge runs on the first node's GPU 0, and the training on all other GPUs of all nodes. The
# judge ends with the job. Slurm asks the training to stop 15 minutes before the time limit: it
# saves, and the same command with --config.resume_from=latest continues. Clone, environments,
# models and config.save_dir must be on a file system that all nodes share. Change the lines below
# for your cluster, or give the same options to sbatch. Arguments: a configuration and options, as
# of scripts/single_node/train_flux.sh.
#
#   JUDGE_MODEL     folder or hub name (default: X-GenGroup/PaCo-Reward-7B)
#   JUDGE_NAME      served name (default: PaCo-Reward-7B)
#   JUDGE_REWARDS   rewards of the run that ask it, separated by spaces (default: consistency_score;
#                   t2is_variety: "consistency_score between_images"; editing configurations:
#                   consistency_for_editing; ocr and pickscore: "")
#   JUDGE_GPUS      GPUs of the first node for the judge (default: 0)
#   VLLM_PORT       its port (default: 8000)
#   VLLM_API_KEY    its key; processes get it by their environment (default: a random one)
#   MASTER_PORT     of the training (default: 29500)
#SBATCH --job-name=paco-grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
#SBATCH --output=slurm-%j.log
set -euo pipefail
# Slurm runs a copy of this file, so the repository is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source ../tools/python.sh
show_help scripts/slurm/train.sh "$@"
if [[ -z "${SLURM_JOB_ID:-}" ]]; then
  echo "error: start this with sbatch; --help says how" >&2
  exit 2
fi
if (($# == 0)); then
  echo "error: name a configuration: sbatch scripts/slurm/train.sh t2is" >&2
  exit 2
fi

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR="$first"
export MASTER_PORT="${MASTER_PORT:-29500}"
export JUDGE_GPUS="${JUDGE_GPUS:-0}"
export VLLM_PORT="${VLLM_PORT:-8000}"
export VLLM_LABEL="slurm-$SLURM_JOB_ID"
export VLLM_API_KEY="${VLLM_API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
# Newer Slurm does not hand this option of sbatch on to srun.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-64}"

options=()
for reward in ${JUDGE_REWARDS-consistency_score}; do
  options+=("--config.train.reward_fn_kwargs.$reward.base_url=http://$first:$VLLM_PORT")
done

# An EXIT trap runs after a signal only if the signal has a handler that ends the script.
trap 'bash vllm_server/stop.sh' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
CUDA_VISIBLE_DEVICES="$JUDGE_GPUS" VLLM_HOST=0.0.0.0 \
  VLLM_MODEL_PATHS="${JUDGE_MODEL:-X-GenGroup/PaCo-Reward-7B}" \
  VLLM_MODEL_NAMES="${JUDGE_NAME:-PaCo-Reward-7B}" \
  bash vllm_server/launch.sh

# In the background, because bash runs a trap only between two foreground commands.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash scripts/slurm/node.sh "$@" "${options[@]}" &
status=0
wait $! || status=$?
exit "$status"
