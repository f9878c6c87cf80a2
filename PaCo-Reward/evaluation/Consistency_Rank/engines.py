"""Ways to have pairs scored: vLLM in this process, transformers in this process, or a server."""

from collections.abc import Callable, Sequence

from rank_data import BenchError

from paco_judge.client import JudgeClient, JudgeError, Pair
from paco_judge.images import png_data_url
from paco_judge.questions import build_messages
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

Engine = Callable[[Sequence[Pair]], list[Verdict]]
TOP_LOGPROBS = 20


def vllm_engine(model: str, tensor_parallel_size: int, gpu_memory_utilization: float) -> Engine:
    """vLLM offline.

    Raises:
        BenchError: vLLM cannot be imported here; names the other engines.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise BenchError(
            f"vLLM cannot be imported here ({error}); install it (bash setup.sh --vllm), "
            "or choose --engine transformers, or --server URL"
        ) from error
    llm = LLM(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=8192,
        limit_mm_per_prompt={"image": 2},
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP_LOGPROBS)

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        chats = [build_messages(png_data_url(p.image_a), png_data_url(p.image_b), p.question) for p in pairs]
        outputs = llm.chat(chats, sampling, use_tqdm=False)
        return [_verdict(output.outputs[0].logprobs[0]) for output in outputs]

    return score


def _verdict(logprobs: dict) -> Verdict:
    p_yes = p_yes_from_top_logprobs({entry.decoded_token: entry.logprob for entry in logprobs.values()})
    if p_yes is None:
        return Verdict(None, f"neither Yes nor No is among the top {TOP_LOGPROBS} tokens")
    return Verdict(p_yes)


def transformers_engine(model: str, adapter: str | None, batch_size: int) -> Engine:
    """transformers in this process, on the first GPU or the CPU; `batch_size` pairs at once.

    Raises:
        BenchError: the model or adapter cannot be loaded, or paco-reward is not installed here.
    """
    try:
        from paco_reward.errors import PacoRewardError
        from paco_reward.scorer import JudgeScorer
    except ImportError as error:
        raise BenchError(f"--engine transformers needs paco-reward ({error}); run: bash setup.sh") from error
    try:
        return JudgeScorer.from_pretrained(model, adapter, batch_size=batch_size).score
    except PacoRewardError as error:
        raise BenchError(str(error)) from error


def server_engine(url: str, model: str) -> Engine:
    """An OpenAI-compatible server that serves `model`.

    Raises:
        BenchError: nothing answers there, or another model.
    """
    client = JudgeClient(base_url=url, model=model)
    try:
        client.check()
    except JudgeError as error:
        raise BenchError(str(error)) from error
    return client.score_blocking


def choose_engine(name: str | None, server: str | None) -> str:
    """The engine to use: --server, or --engine, or vLLM."""
    if server:
        return "server"
    return name or "vllm"
