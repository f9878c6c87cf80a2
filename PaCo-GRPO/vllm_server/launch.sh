#!/usr/bin/env bash
# Start judge servers and wait until they answer, from PaCo-GRPO:  bash vllm_server/launch.sh
#
#   VLLM_MODEL_PATHS=/models/PaCo-Reward-7B VLLM_MODEL_NAMES=PaCo-Reward-7B VLLM_PORT=8000 \
#     bash vllm_server/launch.sh
#
#   VLLM_MODEL_PATHS       folders or hub names, separated by commas (required)
#   VLLM_MODEL_NAMES       served names (default: the folders' names)
#   VLLM_HOST, VLLM_PORT   address (default: 127.0.0.1, 8000). Any other host needs VLLM_API_KEY
#   VLLM_API_KEY           required on every route except /health (default: none)
#   VLLM_LABEL             name of the launch, for status.sh and stop.sh (default: default)
#   VLLM_ENGINE            vllm, transformers or auto (default: auto = vLLM where it is installed)
#   CUDA_VISIBLE_DEVICES   GPUs (default: one per model, the rest is for the training); all of a
#                          node of eight: 0,1,2,3,4,5,6,7; empty = the CPU
#   VLLM_TP, VLLM_REPLICAS GPUs per copy (default: 1), and copies of each model (default: as many as
#                          there are GPUs for in CUDA_VISIBLE_DEVICES)
#   VLLM_MAX_PIXELS        larger images are shrunk to it (default: 2097152, as in the judge's
#                          training); 0 = the model's own. Commands that load a judge read it, too
#   VLLM_MAX_IMAGES        images in one request to vLLM (default: 16)
#   MAX_MODEL_LEN          vLLM's longest request in tokens (default: 8192)
#   GPU_MEMORY_UTILIZATION vLLM's share of a GPU's memory (default: 0.85)
#   VLLM_EXTRA_ARGS        further arguments for the engine; they win
#   VLLM_START_TIMEOUT     seconds until the models must answer (default: 1800)
#   VLLM_PYTHON            interpreter with vLLM (default: the activated one, the PATH's,
#                          .venv-vllm)
#   PACO_RUNTIME_DIR       state and logs (default: ~/.local/state/paco-rl/HOST)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tools/python.sh"
show_help "$0" "$@"
choose_python psutil pydantic fastapi httpx uvicorn filelock aiohttp tqdm
export PYTHONPATH="$here/..:$here/../../PaCo-Reward/judge${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m vllm_server.launch "$@"
