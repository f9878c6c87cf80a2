"""What an epoch asks the judge, and how long the training waits for the answers.

The rewards themselves make the questions, about plain images of the run's sizes. FLOPs are those of
Qwen2.5-VL-7B, the architecture of PaCo-Reward-7B, on vLLM. It computes the beginning of questions
once if they share it (the system prompt and images), and encodes an image once. The server on
transformers, which has the judge in 4 bits beside the training, computes all of every question.
"""

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from paco_grpo.architectures import pipeline_of
from paco_grpo.data.sets import divide, prompt_sets
from paco_grpo.estimate.generator import NF4, RESERVE, bytes_of
from paco_grpo.item import Item
from paco_grpo.objectives import create_objective
from paco_grpo.options import RunOptions
from paco_grpo.rewards.asking import JudgeReward
from paco_grpo.rewards.registry import find_factory, short_name
from paco_grpo.sampling.images import item_size
from paco_grpo.training.state import Plan, make_plan
from paco_judge.errors import UserError
from paco_judge.questions import Pair
from paco_judge.weights import TRAINED_MAX_PIXELS

# Of the stated peak, assumed: no judge of 7B has run on a GPU here.
SHARE = 0.3
_MOST_ITEMS = 150  # of a prompt set whose questions are counted; the others are like them
_TOKEN_SIDE = 28  # pixels
_MIN_PIXELS = 56 * 56  # to which Qwen2.5-VL's processor enlarges an image
# Tokens of the chat template: before the first image, around each image, and at the end.
_BEGINNING = 14
_AROUND_IMAGE = 2
_END = 5
_BLOCK = 16  # tokens in a block of vLLM's cache, which keeps whole blocks
_BATCH = 32  # questions that the server on transformers answers together


class Questions(NamedTuple):
    """What a reward asks in an epoch, of all copies of the judge together."""

    count: float
    tokens: float
    kept_tokens: float  # of ``tokens``, those that vLLM has computed before
    encoded_tokens: float  # of images, that the vision encoder computes
    flops: float
    after_sampling: bool  # it compares images


class Judge:
    """``copies`` of Qwen2.5-VL-7B, which answer in turn. Each has a cache of its own.

    With infinitely many, nothing is computed before.
    """

    def __init__(self, copies: float) -> None:
        self.copies = copies
        pipeline = pipeline_of("Qwen/Qwen-Image", torch.bfloat16)  # whose text encoder it is
        self._tokenizer = pipeline.tokenizer  # about as fine as the real one
        self._text_tokens: dict[str, int] = {}
        model = pipeline.text_encoder.model
        # FLOPs of a token: each weight multiplies and adds once, but in the encoder's blocks once
        # for each of the four patches of an image token.
        self.language_flops = 2 * _parameters(model.language_model.layers)
        self.vision_flops = 2 * _parameters(model.visual.merger)
        self.vision_flops += 2 * 4 * _parameters(model.visual.blocks)

    def cost(self, pairs: Sequence[Pair]) -> np.ndarray:
        """The numbers (5,) of ``Questions``, of ``pairs`` that are asked one after the other."""
        tokens = kept = encoded = 0
        image_uses: Counter[int] = Counter()
        prefix_uses: Counter[tuple[int, ...]] = Counter()  # of the first images of a question
        for pair in pairs:
            sizes = [image_tokens(image) for image in pair.images]
            around_images = _AROUND_IMAGE * len(sizes)
            tokens += _BEGINNING + around_images + sum(sizes) + self._length(pair.question) + _END
            kept_images = 0
            prefix: tuple[int, ...] = ()
            for image, size in zip(pair.images, sizes, strict=True):
                image_uses[id(image)] += 1
                # The questions go round the copies, and each copy computes it once.
                if image_uses[id(image)] <= self.copies:
                    encoded += size
                prefix += (id(image),)
                prefix_uses[prefix] += 1
                if prefix_uses[prefix] > self.copies:
                    kept_images += _AROUND_IMAGE + size
            if kept_images:
                kept += (_BEGINNING + kept_images) // _BLOCK * _BLOCK
        flops = (tokens - kept) * self.language_flops + encoded * self.vision_flops
        return np.array([len(pairs), tokens, kept, encoded, flops], dtype=np.float64)

    def _length(self, text: str) -> int:
        if text not in self._text_tokens:
            self._text_tokens[text] = len(self._tokenizer(text).input_ids)
        return self._text_tokens[text]


def questions_of_epoch(options: RunOptions, plan: Plan, copies: float) -> dict[str, Questions]:
    """What each reward asks of a judge with ``copies``, by short name.

    Raises UserError: The training's prompts are not there.
    """
    sets = prompt_sets(options)
    prompts_of_sets = divide(plan.prompts, [prompt_set.share for prompt_set in sets])
    costs: dict[str, np.ndarray] = {}
    compares_images: dict[str, bool] = {}
    judge = None
    for prompt_set, prompts in zip(sets, prompts_of_sets, strict=True):
        rewards = judge_rewards(prompt_set.train.kwargs)
        if not rewards:
            continue
        judge = judge or Judge(copies)
        items = prompt_set.load("train")
        number = min(len(items), _MOST_ITEMS)
        for name, reward in rewards.items():
            compares_images[name] = reward.compares_images
            for index in np.linspace(0, len(items) - 1, number).round().astype(int):
                pairs = questions_of_item(reward, items[index], options, plan.images_per_prompt)
                cost = judge.cost(pairs) * prompts / number
                costs[name] = costs.get(name, 0) + cost
    return {name: Questions(*cost, compares_images[name]) for name, cost in costs.items()}


def judge_rewards(kwargs: Mapping[str, Mapping[str, Any]]) -> dict[str, JudgeReward]:
    """Those of the rewards with these arguments that ask for Yes or No, by short name."""
    rewards = {}
    for name, arguments in kwargs.items():
        if "server" in arguments:
            continue
        factory = find_factory(name)
        if inspect.isclass(factory) and issubclass(factory, JudgeReward):
            rewards[short_name(name)] = factory(**arguments)
    return rewards


def questions_of_item(
    reward: JudgeReward, item: Item, options: RunOptions, count: int
) -> list[Pair]:
    """All that ``reward`` asks about ``count`` images of ``item``."""
    item = item.load()
    height, width = item_size(item, options.train.resolution, options.item_size)
    images = [Image.new("RGB", (width, height)) for _ in range(count)]
    if reward.compares_images:
        return reward.ask(images, item)[0]
    pairs: list[Pair] = []
    for image in images:
        pairs += reward.ask([image], item)[0]
    return pairs


def image_tokens(image: Image.Image) -> int:
    """The tokens of an image in the language model of Qwen2.5-VL."""
    height, width = smart_resize(
        image.height, image.width, _TOKEN_SIDE, _MIN_PIXELS, TRAINED_MAX_PIXELS
    )
    return height * width // _TOKEN_SIDE**2


class JudgePart(NamedTuple):
    """The judge in an estimate."""

    lines: list[str]  # of the report
    waiting: float = 0.0  # seconds that the training waits for it in an epoch
    gpus: int = 0  # of its own
    beside: Mapping[str, int] = {}  # bytes that it takes of the training's GPU, by part


def judge_part(
    options: RunOptions, phases: Mapping[str, float], processes: int, gpus: int, stated: float
) -> JudgePart:
    """What a judge costs an epoch.

    Args:
        options: Of the run.
        phases: Seconds of each phase of an epoch, without the wait.
        processes: GPUs that generate.
        gpus: That serve the judge, one copy on each; 0: one in 4 bits is on the training's.
        stated: TFLOP a second of a GPU.
    """
    plan = make_plan(options, processes, create_objective(options).gradient_steps)
    try:
        questions = questions_of_epoch(options, plan, gpus or math.inf)
    except UserError as error:
        return JudgePart([f"the judge is left out: {error}"])
    if not questions:
        return JudgePart([])
    speed = max(gpus, 1) * SHARE * stated * 1e12
    title = f"judge, {gpus} GPU(s)" if gpus else "judge, same GPU"
    lines = [f"\n{title:<22}questions   tokens  kept    TFLOP  seconds"]
    for name, (count, tokens, kept_tokens, _, flops, _) in questions.items():
        numbers = f"{count:9.0f}{tokens:9.0f}{kept_tokens / tokens:6.0%}{flops / 1e12:9.0f}"
        lines.append(f"{name:<22}{numbers}{flops / speed:9.1f}")
    if gpus:
        sampling = sum(seconds for phase, seconds in phases.items() if phase != "train")
        waiting = waiting_seconds(questions.values(), sampling, plan.rollout_batches, speed)
    else:  # neither works faster while both do
        waiting = sum(of_reward.flops for of_reward in questions.values()) / speed
    total = sum(phases.values()) + waiting
    lines.append(
        f"seconds: assumed {SHARE:.0%}. The training waits {waiting:.1f} s, so an epoch takes "
        f"{total:.1f} s: {plan.samples / total:.2f} images a second"
    )
    longest = max(of_reward.tokens / of_reward.count for of_reward in questions.values())
    return JudgePart(lines, waiting, gpus, {} if gpus else bytes_in_4_bits(longest))


def bytes_in_4_bits(tokens: float) -> dict[str, int]:
    """What Qwen2.5-VL-7B takes of a GPU in 4 bits, with questions of so many tokens, by part."""
    model = pipeline_of("Qwen/Qwen-Image", torch.bfloat16).text_encoder
    weights = bytes_of(model)
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    layers.remove(model.lm_head)
    for layer in layers:
        weights -= int(layer.weight.nbytes - layer.weight.numel() * NF4)
    largest = max(layer.weight.nbytes for layer in layers)  # in bfloat16 while it computes
    return {
        "judge": weights,
        "its questions": int(_BATCH * tokens * bytes_of_token(model.config.text_config)) + largest,
        "CUDA of its process": RESERVE,
    }


def bytes_of_token(config: Any) -> int:
    """Most bytes of a token in a language model: keys and values of all layers, and in one layer
    four tensors of the feed-forward part.
    """
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return 2 * (2 * config.num_hidden_layers * width + 4 * config.intermediate_size)


def waiting_seconds(
    questions: Iterable[Questions], sampling: float, batches: int, speed: float
) -> float:
    """How long the training waits for the judge when its sampling is done.

    Args:
        questions: Of an epoch.
        sampling: Seconds in which the images arrive, in ``batches`` of equal size.
        batches: Of each process.
        speed: FLOPs a second of all copies of the judge together.
    """
    during = after = 0.0
    for of_reward in questions:
        if of_reward.after_sampling:
            after += of_reward.flops / speed
        else:
            during += of_reward.flops / speed
    # Either the judge is faster, and answers the last batch after the others, or it is slower, and
    # works without a pause since the first batch.
    end = max(sampling + during / batches, sampling / batches + during)
    return end - sampling + after


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
