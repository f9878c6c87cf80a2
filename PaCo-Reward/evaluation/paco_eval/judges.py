"""The judge that a benchmark asks: vLLM or transformers in this process, or a server."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paco_judge.client import JudgeClient
from paco_judge.errors import UserError
from paco_judge.images import as_received
from paco_judge.questions import CHAT_OPTIONS, Pair, RequestForm, build_messages, form_of
from paco_judge.verdict import TOP_LOGPROBS, Verdict, entry, verdict_from_top_logprobs
from paco_judge.weights import allowed_pixels, explain_missing, image_limits

ScorePairs = Callable[[Sequence[Pair]], list[Verdict]]

MAX_MODEL_LEN = 8192
DEADLINE_S = 600.0  # for each batch that a server is asked
# vLLM reads these when it is imported; the user's own values win. On a CPU its default sizes would
# take all memory.
VLLM_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def make_engine(args: argparse.Namespace) -> ScorePairs:
    """The engine that the command line selects."""
    form = form_of(args)
    if args.server:
        return ServerEngine(args.server, args.model, form)
    if args.engine == "transformers":
        from paco_judge.scorer import JudgeScorer

        return JudgeScorer.from_pretrained(
            args.model, args.adapter, batch_size=args.batch_size, form=form
        ).score
    return VllmEngine(args.model, args.tensor_parallel_size, args.gpu_memory_utilization, form)


class ServerEngine:
    """An OpenAI-compatible server.

    Raises UserError: There is no server, at the start or later.
    """

    def __init__(
        self, url: str, model: str | None, form: RequestForm, deadline_s: float = DEADLINE_S
    ) -> None:
        self._connect = partial(JudgeClient, url, model, deadline_s=deadline_s, form=form)
        self._client = self._connect()
        self._client.check()

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        verdicts = self._client.score(pairs)
        if not any(verdict.ok for verdict in verdicts):
            # A new client asks again. It raises if the server, not these pairs, is the problem.
            self._connect().check()
        return verdicts


class VllmEngine:
    """Offline vLLM on the GPUs or, with vllm-cpu, on the CPU."""

    def __init__(
        self,
        model: str,
        tensor_parallel_size: int,
        gpu_memory_utilization: float,
        form: RequestForm,
    ) -> None:
        for name, value in VLLM_SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from transformers import AutoConfig
            from vllm import LLM, SamplingParams
            from vllm.platforms import current_platform
        except ImportError as error:
            raise UserError(
                f"vLLM cannot be imported in {sys.executable} ({error}); use "
                ".venv-vllm/bin/python (bash setup.sh --vllm), or --engine transformers, or "
                "--server URL"
            ) from error
        with explain_missing(model):
            text = AutoConfig.from_pretrained(model).get_text_config()
        limits = image_limits(model)
        longest = getattr(text, "max_position_embeddings", MAX_MODEL_LEN)
        options: dict[str, Any] = {}
        max_pixels = allowed_pixels()  # as a server
        if limits is not None and 0 < max_pixels < limits["longest_edge"]:
            options["mm_processor_kwargs"] = {"max_pixels": max_pixels}
        if current_platform.is_cpu():
            # A second process would import everything again.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            # vLLM has Qwen3.5's linear attention in bfloat16 alone there.
            is_linear = text.model_type.startswith("qwen3_5")
            options["dtype"] = "bfloat16" if is_linear else "float32"
            options["enforce_eager"] = True
        self._form = form
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP_LOGPROBS)
        self._llm = LLM(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=min(MAX_MODEL_LEN, longest),
            limit_mm_per_prompt={"image": 3, "video": 0},
            **options,
        )

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        chats = list(map(self._messages, pairs))
        outputs = self._llm.chat(
            chats, self._sampling, use_tqdm=False, chat_template_kwargs=CHAT_OPTIONS
        )
        return list(map(self._verdict, outputs))

    def _messages(self, pair: Pair) -> list[dict[str, Any]]:
        """The chat messages, with images in place of their URLs."""
        messages = build_messages([""] * len(pair.images), pair.question, self._form)
        content = messages[0]["content"]
        images = iter(pair.images)
        for number, part in enumerate(content):
            if part["type"] == "image_url":
                image = as_received(next(images), self._form.image_format)
                content[number] = {"type": "image_pil", "image_pil": image}
        return messages

    def _verdict(self, output: Any) -> Verdict:
        top = []
        for token in output.outputs[0].logprobs[0].values():
            top.append(entry(token.decoded_token, token.logprob))
        return verdict_from_top_logprobs(top, self._form.answer_tokens)
