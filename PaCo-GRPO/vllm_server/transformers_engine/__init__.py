"""The part of OpenAI's API that a judge needs, served from transformers on a CPU or one GPU.

    python -m vllm_server.transformers_engine --model FOLDER --served-model-name NAME --port 8000

``protocol`` reads and refuses requests, ``model`` prepares and runs batches, ``adapters`` holds LoRA beside the base,
``batching`` collects what is queued into batches on two threads, ``server`` is the HTTP side.
"""
