"""vLLM in this process."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paco_eval.errors import BenchError
from paco_judge.client import Pair
from paco_judge.questions import build_messages
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

TOP_LOGPROBS = 20
UNANSWERED = f"neither Yes nor No is among the judge's top {TOP_LOGPROBS} tokens"
MAX_MODEL_LEN = 8192
# vLLM reads these when it is imported; what the user has set stays. Sizes of its own choice on a CPU take all memory.
SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
REMEDY = (
    "install it beside (bash setup.sh --vllm) and start this with the repository's .venv-vllm/bin/python, or "
    "`pip install vllm` here, or choose --engine transformers, or --server URL"
)


def vllm_engine(
    model: str, tensor_parallel_size: int, gpu_memory_utilization: float
) -> Callable[[Sequence[Pair]], list[Verdict]]:
    """vLLM offline, on the GPUs or, with vllm-cpu, on the CPU (float32, nothing compiled).

    An image that stands in several pairs (the reference of an item) is preprocessed once and goes through the vision
    tower once: vLLM knows images by a hash of their pixels, in its processor cache and in its encoder cache. Pairs
    that begin with the same image share its prefix.

    Raises:
        BenchError: vLLM cannot be imported here (names the remedies), or cannot load the model.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from transformers import AutoConfig
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        raise BenchError(f"vLLM cannot be imported in {sys.executable} ({error}); {REMEDY}") from error
    if current_platform.is_unspecified():
        raise BenchError(f"the vLLM of {sys.executable} finds no device that it was built for; {REMEDY}")
    on_cpu = {}
    if current_platform.is_cpu():
        on_cpu = {"dtype": "float32", "enforce_eager": True}
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a second process would import all of it again
    print(f"loading {model} in vLLM (a minute or more)", file=sys.stderr, flush=True)
    try:
        text = AutoConfig.from_pretrained(model).get_text_config()
        llm = LLM(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=min(MAX_MODEL_LEN, getattr(text, "max_position_embeddings", MAX_MODEL_LEN)),
            limit_mm_per_prompt={"image": 2, "video": 0},
            **on_cpu,
        )
    except (OSError, ValueError, RuntimeError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BenchError(f"vLLM cannot load {model}: {cause} (VLLM_LOGGING_LEVEL=INFO shows more)") from error
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP_LOGPROBS)

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        outputs = llm.chat([chat(pair) for pair in pairs], sampling, use_tqdm=False)
        return [_verdict(output.outputs[0].logprobs[0]) for output in outputs]

    return score


def chat(pair: Pair) -> list[dict[str, Any]]:
    """The messages of a pair with the images themselves in the place of their urls."""
    message = build_messages("", "", pair.question)[0]
    images = iter((pair.image_a, pair.image_b))
    content = [
        {"type": "image_pil", "image_pil": next(images)} if part["type"] == "image_url" else part
        for part in message["content"]
    ]
    return [{"role": message["role"], "content": content}]


def _verdict(logprobs: dict) -> Verdict:
    p_yes = p_yes_from_top_logprobs({entry.decoded_token: entry.logprob for entry in logprobs.values()})
    if p_yes is None:
        return Verdict(None, UNANSWERED)
    return Verdict(p_yes)
