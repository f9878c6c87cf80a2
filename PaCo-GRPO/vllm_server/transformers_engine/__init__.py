"""The part of OpenAI's API that a judge needs, served with transformers on a CPU or one GPU.

    python -m vllm_server.transformers_engine --model FOLDER --served-model-name NAME --port 8000

``protocol`` reads requests, ``model`` prepares and runs batches, ``adapters`` holds LoRA next to the base, ``batching``
forms batches, ``server`` is the HTTP side.
"""
