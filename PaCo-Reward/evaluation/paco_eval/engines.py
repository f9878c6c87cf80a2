"""Ways to have pairs scored: vLLM in this process, transformers in this process, or a server."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paco_eval.errors import BenchError
from paco_eval.offline import TOP_LOGPROBS, vllm_engine
from paco_judge.client import JudgeClient, JudgeError, Pair
from paco_judge.images import content_digest
from paco_judge.verdict import Verdict

Engine = Callable[[Sequence[Pair]], list[Verdict]]


def transformers_engine(model: str, adapter: str | None, batch_size: int) -> Engine:
    """transformers in this process, on the first GPU or the CPU; `batch_size` pairs at once.

    Raises:
        BenchError: the model or adapter cannot be loaded, or paco-reward is not installed here.
    """
    try:
        from paco_reward.errors import PacoRewardError
        from paco_reward.scorer import JudgeScorer
    except ImportError as error:
        raise BenchError(
            f"--engine transformers needs paco-reward, which {sys.executable} lacks ({error}); run bash setup.sh and "
            "start this with the repository's .venv/bin/python"
        ) from error
    try:
        judge = JudgeScorer.from_pretrained(model, adapter, batch_size=batch_size)
    except PacoRewardError as error:
        raise BenchError(str(error)) from error

    # Only what a server or vLLM would report counts, so that all engines agree on what has no score.
    return lambda pairs: judge.score(pairs, top=TOP_LOGPROBS)


def server_engine(url: str, model: str, deadline_s: float = 600.0) -> Engine:
    """An OpenAI-compatible server that serves `model`; `deadline_s`: for one batch, in seconds.

    Raises:
        BenchError: nothing answers there, or another model; from the engine too, when the server is gone.
    """

    def check(client: JudgeClient) -> JudgeClient:
        try:
            client.check()
        except (JudgeError, ValueError) as error:
            raise BenchError(str(error)) from error
        return client

    def connect() -> JudgeClient:
        try:
            return JudgeClient(base_url=url, model=model, deadline_s=deadline_s)
        except ValueError as error:
            raise BenchError(f"--server: {error}") from error

    client = check(connect())

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        verdicts = client.score_blocking(pairs)
        if not any(verdict.ok for verdict in verdicts):
            check(connect())  # a new client asks again: is it these pairs, or is the judge gone?
        return verdicts

    return score


def asking_once(engine: Engine) -> Engine:
    """An engine that answers from memory what was asked before: same pixels, same order, same question."""
    known: dict[tuple, Verdict] = {}

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        digests = {id(image): content_digest(image) for pair in pairs for image in (pair.image_a, pair.image_b)}
        keys = [(pair.question, digests[id(pair.image_a)], digests[id(pair.image_b)]) for pair in pairs]
        new = {key: pair for key, pair in zip(keys, pairs) if key not in known}
        if new:
            answers = dict(zip(new, engine(list(new.values())), strict=True))
            known.update({key: verdict for key, verdict in answers.items() if verdict.ok})
        return [known[key] if key in known else answers[key] for key in keys]

    return score


def choose_engine(name: str | None, server: str | None) -> str:
    """The engine to use: --server, or --engine, or vLLM."""
    if server:
        return "server"
    return name or "vllm"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark's command line says about the judge, except --model."""
    parser.add_argument("--adapter", help="adapter folder (engine transformers)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs (engine vllm)")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.85, help="share of each GPU (engine vllm)")
    parser.add_argument("--batch_size", type=int, default=8, help="pairs given to the engine at once")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="default: vllm")
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument("--results_dir", default="results")


def make_engine(args: argparse.Namespace) -> tuple[str, Engine]:
    """The engine that the command line asks for, and its name.

    Raises:
        BenchError: it cannot be had.
    """
    name = choose_engine(args.engine, args.server)
    if args.adapter and name != "transformers":
        raise BenchError(f"--adapter needs --engine transformers, not {name}; or export the merged model first")
    if name == "server":
        return name, server_engine(args.server, args.model)
    if name == "transformers":
        return name, transformers_engine(args.model, args.adapter, args.batch_size)
    return name, vllm_engine(args.model, args.tensor_parallel_size, args.gpu_memory_utilization)


def model_names(model: str, adapter: str | None) -> tuple[str, str]:
    """Which judge this is: (exactly, for the rows of a results file; short, for the file's name).

    Two checkpoints may share a folder name, hence the exact one: absolute paths of local folders.
    """
    exact = str(Path(model).resolve()) if Path(model).is_dir() else model
    short = Path(os.path.abspath(model)).name
    if adapter:
        exact += f" + {Path(adapter).resolve()}"
        short += f"+{Path(os.path.abspath(adapter)).name}"
    return exact, short
