"""Any flow-matching pipeline of diffusers as a policy: its own ``__call__``, stopped where needed.

A pipeline's call encodes the text, draws noise, makes its schedule, steps from noise to image and
decodes. A shallow copy of the pipeline runs that call with a scheduler of ours, so that it ends
where the loop begins (features, noise, schedule) or at the first step (the velocity at one σ), or
has no step (decoding). What it computes of texts and references is recorded once per item and
played back. The user's pipeline is not touched.
"""

import copy
import functools
import hashlib
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from paco_grpo.policies.base import PolicyLoadError, PolicySettings
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, image_digest, on_white
from paco_grpo.types import Conditioning, Item, to_device

logger = logging.getLogger(__name__)

# Methods of pipelines whose results depend on texts, references and size alone, except the noise.
_RECORDED = re.compile(r"encode_|prepare_\w*latents$")
_NOISE = "prepare_latents"
# Options of a call that rewrite prompts or change the size of images.
_SWITCHED_OFF = re.compile(r"rewrit|upsampling$|use_pe$|resolution_binning|auto_resize")
# Modules of a transformer's blocks whose linear layers get a LoRA, and those whose do not.
_ADAPTED = re.compile(r"(^|\.)(attn|attention|ff|ffn|feed_forward|mlp|\w+_mlp)(_\w+)?\d*\.")
_NOT_ADAPTED = re.compile(r"norm|ada_?ln|modulation")

# A scale without guidance, also in a pipeline that counts it from 0.
_UNGUIDED = 0.0

# σ of each step, and the time that the transformer gets there
Steps = Sequence[tuple[float, float]]
# A recorded call: the method, its text or texts, and how many calls like it came before
Key = tuple[str, Any, int]
# Text tokens that may be asked of any pipeline; the default of many is fewer.
_TEXT_LIMIT = 512
_INTERPOLATED_STEPS = 20


class _Stop(Exception):
    """Ends a pipeline's call; ``value`` is its result: a schedule or a velocity."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Recording:
    """What a pipeline computed of one item before its loop."""

    item: Item
    results: Mapping[Key, Any]  # of ``prepare_latents``: without the noise
    # Recordings of one signature may share a call: they differ only in what has a row for each.
    signature: Hashable


@dataclass
class RecordedConditioning(Conditioning):
    """The recordings of B items, in their order."""

    recordings: list[Recording]

    @override
    def __len__(self) -> int:
        return len(self.recordings)

    @override
    def select(self, index: torch.Tensor | Sequence[int] | slice) -> Self:
        rows = np.arange(len(self))[index.cpu() if isinstance(index, torch.Tensor) else index]
        return type(self)([self.recordings[row] for row in rows])

    @classmethod
    @override
    def cat(cls, parts: Sequence[Self]) -> Self:
        recordings = []
        for part in parts:
            recordings += part.recordings
        return cls(recordings)


@dataclass
class _Tape:
    """Records a call's methods (no ``recordings``), or plays them back, one for each text.

    ``latents`` take the place of the noise; without them a call draws it.
    """

    recordings: Sequence[Recording] = ()
    latents: torch.Tensor | None = None  # in the pipeline's shape
    noise: Any = None  # that the call has drawn, in the pipeline's shape
    results: dict[Key, Any] = field(default_factory=dict)  # recorded

    def result(self, key: Key, compute: Callable[[], Any]) -> Any:
        """What the call ``key`` returns: played back, or computed and recorded."""
        is_noise = key[0] == _NOISE
        if self.recordings and not (is_noise and self.latents is None):
            value = self._played(*key)
            return _with_noise(value, self.latents) if is_noise else value
        value = compute()
        self.results[key] = value
        if is_noise:
            self.noise = value[0] if isinstance(value, tuple) else value
            self.results[key] = _with_noise(value, None)
        return value

    def _played(self, name: str, texts: Any, count: int) -> Any:
        if not isinstance(texts, tuple) or len(texts) != len(self.recordings):
            texts = [texts] * len(self.recordings)
        parts = []
        for recording, text in zip(self.recordings, texts, strict=True):
            parts.append(recording.results[name, text, count])
        return _joined(parts)


class _Driven:
    """A shallow copy of a pipeline whose recorded methods go through ``tape``."""

    tape: _Tape
    scheduler: FlowMatchEulerDiscreteScheduler
    placed_on: torch.device
    stops_before_loop: bool

    # Without this, a pipeline takes the device of one of its models, which may be offloaded.
    device = _execution_device = property(lambda self: self.placed_on)

    def progress_bar(self, *args: Any, **kwargs: Any) -> Any:
        """Called by a pipeline where its loop over the steps begins."""
        if self.stops_before_loop:
            raise _Stop(self.scheduler)
        return super().progress_bar(*args, **kwargs)


@functools.cache
def _driven(pipeline_class: type[DiffusionPipeline]) -> type:
    methods = {}
    for name in dir(pipeline_class):
        function = inspect.getattr_static(pipeline_class, name)
        if _RECORDED.match(name) and isinstance(function, FunctionType):
            methods[name] = _taped(name, function)
    return type(pipeline_class.__name__, (_Driven, pipeline_class), methods)


def _taped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``name`` of a ``_Driven`` pipeline."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        texts = None
        if name.startswith("encode_"):
            texts = kwargs.get("prompt", args[0] if args else None)
        if isinstance(texts, list):
            texts = texts[0] if len(texts) == 1 else tuple(texts)
        count = self.calls[name, texts]
        self.calls[name, texts] += 1
        compute = functools.partial(function, self, *args, **kwargs)
        return self.tape.result((name, texts, count), compute)

    return method


class GenericPolicy(DiffusersPolicy):
    """A pipeline that nobody wrote a policy for; ``generic_policy`` makes its class.

    A token is a cell of the latents. Samples with references have a call each, and so has each σ of
    a forward.
    """

    arguments: ClassVar[frozenset[str]]  # of the call
    scale: ClassVar[str | None]  # the argument that ``guidance_scale`` is
    scale_guides: ClassVar[bool]  # of true CFG; else it is an input of the transformer
    switched_off: ClassVar[tuple[str, ...]]  # arguments that are False
    reference_argument: ClassVar[str | None]

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        self.lora_targets = _lora_targets(pipeline.transformer)
        if not pipeline.transformer._repeated_blocks:  # for compile_repeated_blocks
            pipeline.transformer._repeated_blocks = _names_of_blocks(pipeline.transformer)
        has_text = self.negative_prompt is not None or not self.has_true_cfg
        self.uses_true_cfg = self.scale_guides and has_text and self.guidance_scale > 0
        if self.scale_guides and not has_text and self.guidance_scale > 1:
            logger.warning(
                "no true CFG: config.sample.negative_prompt is None (an empty one is enough)"
            )
        # Without the decorator torch.no_grad
        self._own_call = inspect.unwrap(self.pipeline_class.__call__)
        self._draws_itself = not hasattr(pipeline, _NOISE)  # its call draws the noise inline
        # By (height, width), and the number of steps of a schedule
        self._examples: dict[tuple[int, int], Recording] = {}
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._times: dict[tuple[int, int], dict[float, float]] = {}
        self._schedules: dict[tuple[int, int, int], torch.Tensor] = {}
        self._latents_dtype = torch.float32  # that the pipeline draws its noise in
        self._signatures: dict[Hashable, Hashable] = {}
        self._shares_calls: bool | None = None  # None: not known yet

    @classmethod
    @override
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        names = ("block_out_channels", "encoder_block_out_channels", "dim_mult")
        for name in names:
            if name in vae:
                return 2 * 2 ** (len(vae[name]) - 1)
        raise PolicyLoadError(
            f"{cls.family} cannot be trained: the sides that its VAE takes are unknown, because "
            f"vae/config.json has none of {', '.join(names)}"
        )

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Every model but the transformer and the VAE."""
        models = []
        for name, component in self.pipeline.components.items():
            if isinstance(component, nn.Module) and name not in ("transformer", "vae"):
                models.append(component)
        return models

    # --- a call -----------------------------------------------------------------------------------

    def _run(
        self,
        tape: _Tape,
        items: Sequence[Item],
        steps: Steps | None = None,
        guided: bool = True,
        **arguments: Any,
    ) -> Any:
        """Run the pipeline's call for ``items``, all of one size.

        Args:
            tape: Records what the call computes of its texts, or plays it back.
            items: One for each text; the references are those of the first.
            steps: None: the call makes its own schedule, and stops where its loop begins. One step:
                it stops with the velocity there. None at all, ``()``: it decodes.
            guided: False: without true CFG.
            **arguments: Of the call, beside those of the items, or in place of them.

        Returns:
            The scheduler with its schedule, the velocity, or the pipeline's output.
        """
        scheduler = copy.copy(self._scheduler)
        scheduler.step = functools.partial(_stop_at_step, tape)
        if steps is not None:
            scheduler.set_timesteps = functools.partial(_set_steps, scheduler, steps)
        driven = copy.copy(self.pipeline)
        driven.__class__ = _driven(self.pipeline_class)
        vars(driven).update(
            tape=tape,
            scheduler=scheduler,
            calls=Counter(),
            placed_on=self.device,
            stops_before_loop=steps is None,
            _progress_bar_config={"disable": True},
        )
        arguments = {
            **self.pipeline_arguments(items[0]),
            "prompt": [item.prompt for item in items],
            "num_inference_steps": 2,  # a schedule that ends above 0 needs two
            "output_type": "latent",
            **arguments,
        }
        negative = arguments.pop("negative_prompt", None)
        if self.scale_guides and not guided:
            arguments[str(self.scale)] = _UNGUIDED
        elif negative is not None:
            arguments["negative_prompt"] = [negative] * len(items)
        if self._draws_itself and tape.latents is not None:
            arguments["latents"] = tape.latents
        decodes = steps == ()  # the VAE computes in float32
        try:
            with nullcontext() if decodes else self.autocast():
                output = self._own_call(driven, **arguments)
        except _Stop as stop:
            return stop.value
        if not decodes:
            raise PolicyLoadError(
                f"{self.family} cannot be trained: its call does not use its scheduler's step"
            )
        return output

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        arguments = super().pipeline_arguments(item)
        images = [image.convert("RGB") for image in item.images]
        if images and self.reference_argument:
            arguments[self.reference_argument] = images if len(images) > 1 else images[0]
        return arguments

    @override
    def length_arguments(self, height: int, width: int) -> dict[str, int]:
        lengths = {
            "height": height,
            "width": width,
            "max_area": height * width,
            "max_sequence_length": self.max_sequence_length,
        }
        return {name: length for name, length in lengths.items() if name in self.arguments}

    @override
    def guidance_arguments(self) -> dict[str, object]:
        """With the options that would rewrite the prompt or resize the image."""
        arguments: dict[str, object] = dict.fromkeys(self.switched_off, False)
        if self.scale is None:
            return arguments
        if self.scale_guides and not self.uses_true_cfg:
            return arguments | {self.scale: _UNGUIDED}
        if self.has_true_cfg:
            arguments["negative_prompt"] = self.negative_prompt
        return arguments | {self.scale: self.guidance_scale}

    @override
    def noise_arguments(self, seed: int, item: Item) -> dict[str, Any]:
        return {"generator": torch.Generator().manual_seed(seed)}

    # --- texts and references ---------------------------------------------------------------------

    @torch.no_grad()
    @override
    def encode(self, items: Sequence[Item], text_tokens: int | None = None) -> RecordedConditioning:
        length = text_tokens or self.max_sequence_length
        recordings: dict[Hashable, Recording] = {}
        rows = []
        with ExitStack() as copied:  # one transfer of the encoders for all that is not cached
            for item in items:
                key = _item_key(item)
                if key not in recordings:
                    recordings[key] = self._recording(item.load(), key, length, copied)
                rows.append(recordings[key])
        return RecordedConditioning(rows)

    def _recording(self, item: Item, key: Hashable, length: int, copied: ExitStack) -> Recording:
        def compute() -> dict[Key, Any]:
            copied.enter_context(self._offloaded_text.on_device())
            copied.enter_context(self._offloaded_vae.on_device())
            tape = self._recorded([item], length)
            if self._shares_calls is None and not item.images:
                self._shares_calls = self._has_rows(tape, item, length)
            return tape.results

        results = self._cached_texts.get((key, length), compute)
        signature = _signature(results)
        self._signatures[key] = signature
        on_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), results)
        recording = Recording(item, on_device, signature)
        self._examples.setdefault(item.size, recording)
        return recording

    def _recorded(self, items: Sequence[Item], length: int) -> _Tape:
        tape = _Tape()
        lengths = {"max_sequence_length": length} if "max_sequence_length" in self.arguments else {}
        generator = [torch.Generator().manual_seed(0) for _ in items]
        self._run(tape, items, generator=generator, **lengths)
        return tape

    def _has_rows(self, tape: _Tape, item: Item, length: int) -> bool:
        """Whether a call with two texts computes what ``_joined`` makes of a call for each."""
        joined = [_joined([value, value]) for value in tape.results.values()]
        pair = list(self._recorded([item, item], length).results.values())
        return _shapes(joined) == _shapes(pair)

    @override
    def batch_key(self, item: Item) -> Hashable:
        """Equal for samples that may share a call.

        Processes that shard the transformer need equal numbers of calls: one for each sample.
        """
        if item.num_references or isinstance(self.transformer, FSDPModule):
            return object()
        return item.size, self._signatures.get(_item_key(item))

    @override
    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """About the area ``resolution``² in the shape of ``item``, or else of its first image."""
        if item.height is None or item.width is None:
            width, height = item.images[0].size
        else:
            height, width = item.size
        unit = math.sqrt(height * width) / resolution * self.size_multiple
        rows = max(1, round(height / unit))
        columns = max(1, round(width / unit))
        return rows * self.size_multiple, columns * self.size_multiple

    # --- schedule, noise, velocity, image ---------------------------------------------------------

    def _example(self, size: tuple[int, int]) -> Recording:
        """Of any item of this size, for what depends on the size alone."""
        if size not in self._examples:
            height, width = size
            images = (Image.new("RGB", (width, height), "gray"),) if self.needs_image else ()
            self.encode([Item(0, "", height, width, references=images)])
        return self._examples[size]

    @torch.no_grad()
    @override
    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """As the pipeline's call makes them."""
        size = (height, width)
        if (num_steps, *size) not in self._schedules:
            example = self._example(size)
            with self._offloaded_vae.on_device():
                scheduler = self._run(
                    _Tape([example]), [example.item], num_inference_steps=num_steps
                )
            sigmas = scheduler.sigmas.to("cpu", torch.float32)
            times = zip(sigmas.tolist(), scheduler.timesteps.tolist(), strict=False)
            self._times.setdefault(size, {}).update(times)
            self._schedules[num_steps, *size] = sigmas
        return self._schedules[num_steps, *size].clone()

    def _time(self, sigma: float, size: tuple[int, int]) -> float:
        """What the transformer gets at ``sigma``: 1000σ, unless the pipeline rounds or shifts it.

        Between the σ of its schedules, it is interpolated in one of them: the result does not
        depend on the schedules before.
        """
        if sigma in self._times.get(size, {}):
            return self._times[size][sigma]
        knots = self.sigmas(_INTERPOLATED_STEPS, *size).flip(0).tolist()
        times = [self._times[size].get(knot, 0.0) for knot in knots]
        return float(np.interp(sigma, knots, times))

    @torch.no_grad()
    @override
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        size = (height, width)
        example = self._example(size)
        steps = [(1.0, 1000.0)] if self._draws_itself else None
        rows = []
        with self._offloaded_vae.on_device():
            for seed in seeds:
                tape = _Tape([example])
                generator = torch.Generator().manual_seed(int(seed))
                self._run(tape, [example.item], steps, generator=generator)
                rows.append(_tokens(tape.noise).float())
        self._shapes[size] = tape.noise.shape
        self._latents_dtype = tape.noise.dtype
        return to_device(torch.cat(rows), self.device)

    def _latents(self, tokens: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Tokens (B, L, C) in the pipeline's shape."""
        if size not in self._shapes:
            self.initial_latents([0], *size)
        shape = self._shapes[size]
        if len(shape) == 3:
            return tokens
        return tokens.transpose(1, 2).unflatten(2, shape[2:])

    @override
    def velocity(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        height: int,
        width: int,
        guided: bool = True,
    ) -> torch.Tensor:
        """With a call for each σ, and for each signature or sample with references."""
        recordings = conditioning.recordings
        sigmas = sigma.tolist()
        groups: dict[Hashable, list[int]] = {}
        for row, recording in enumerate(recordings):
            shares = self._shares_calls and not recording.item.num_references
            key = (sigmas[row], recording.signature if shares else row)
            groups.setdefault(key, []).append(row)
        parts = []
        for rows in groups.values():
            noisy = self._latents(latents[rows], (height, width)).to(self._latents_dtype)
            tape = _Tape([recordings[row] for row in rows], noisy)
            items = [recordings[row].item for row in rows]
            sigma_of_rows = sigmas[rows[0]]
            steps = [(sigma_of_rows, self._time(sigma_of_rows, (height, width)))]
            velocity = _tokens(self._run(tape, items, steps, guided))
            self.step_dtype = velocity.dtype  # the scheduler's rule
            parts.append(velocity.float())
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(list(groups.values())))
        return torch.cat(parts)[order]

    @torch.no_grad()
    @override
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        size = (height, width)
        example = self._example(size)
        images = []
        with self._offloaded_vae.on_device():
            for row in latents.split(1):
                tape = _Tape([example], self._latents(row, size))
                output = self._run(tape, [example.item], steps=(), output_type="pil")
                images.append(on_white(output[0][0]))
        return images

    @override
    def _forward(self, inputs: Any) -> torch.Tensor:
        raise NotImplementedError("the pipeline's call makes the forwards")


def guidance_argument(arguments: Mapping[str, inspect.Parameter]) -> str | None:
    """The argument of a pipeline's call that scales its guidance."""
    for name, argument in arguments.items():
        if name.endswith("guidance_scale") and argument.default is not None:
            return name
    return "true_cfg_scale" if "true_cfg_scale" in arguments else None


@functools.cache
def generic_policy(pipeline_class: type[DiffusionPipeline]) -> type[GenericPolicy]:
    """The policy of ``pipeline_class``, by the arguments of its call and its components.

    Raises:
        PolicyLoadError: Its arguments show that it cannot be one.
    """
    name = pipeline_class.__name__
    arguments = inspect.signature(pipeline_class.__call__).parameters
    missing = {"prompt", "height", "width", "latents", "num_inference_steps"} - set(arguments)
    if missing:
        raise PolicyLoadError(
            f"{name} cannot be trained: its call takes no {' and no '.join(sorted(missing))}"
        )
    components = inspect.signature(pipeline_class.__init__).parameters
    if "transformer" not in components:
        raise PolicyLoadError(f"{name} cannot be trained: it has no transformer")
    scale = guidance_argument(arguments)
    # Beside a scale of true CFG, or by another name, it is an input of the transformer.
    is_input = scale != "true_cfg_scale" and (
        scale != "guidance_scale" or "true_cfg_scale" in arguments
    )
    has_negative = "negative_prompt" in arguments
    guides = has_negative or hasattr(pipeline_class, "do_classifier_free_guidance")
    references = [a for a in ("image", "images", "input_images") if a in arguments]
    tokenizers = [component for component in components if component.startswith("tokenizer")]
    policy = type(f"Generic{name}", (GenericPolicy,), {"__doc__": f"``{name}``, by its own call."})
    policy.pipeline_class = pipeline_class
    policy.family = name
    policy.arguments = frozenset(arguments)
    policy.scale = scale
    policy.scale_guides = guides and not is_input
    policy.has_true_cfg = has_negative and not is_input
    policy.switched_off = tuple(a for a in arguments if _SWITCHED_OFF.search(a))
    policy.reference_argument = references[0] if references else None
    policy.edits_images = bool(references)
    policy.several_images = bool(references)
    policy.needs_image = any(arguments[a].default is inspect.Parameter.empty for a in references)
    policy.cuts_text = "max_sequence_length" in arguments
    if policy.cuts_text:
        own_limit = arguments["max_sequence_length"].default
        policy.text_limit = max(own_limit or 0, _TEXT_LIMIT)
    else:
        policy.text_limit = _TEXT_LIMIT
    policy.tokenizer_folder = tokenizers[-1] if tokenizers else "processor"
    return policy


def _set_steps(
    scheduler: FlowMatchEulerDiscreteScheduler,
    steps: Steps,
    num_inference_steps: int | None = None,
    device: torch.device | str = "cpu",
    sigmas: Sequence[float] | None = None,
    timesteps: Sequence[float] | None = None,
    **_: Any,
) -> None:
    """In place of the scheduler's ``set_timesteps``: these steps.

    Pipelines look for parameters named ``sigmas`` and ``timesteps`` before they call it.
    """
    schedule = torch.tensor([*steps, (0.0, 0.0)])
    scheduler.sigmas = to_device(schedule[:, 0], device)
    scheduler.timesteps = to_device(schedule[:-1, 1], device)
    scheduler.num_inference_steps = len(steps)


def _stop_at_step(tape: _Tape, model_output: Any, timestep: Any, sample: Any, **_: Any) -> None:
    """In place of the scheduler's ``step``."""
    tape.noise = sample
    raise _Stop(model_output)


def _lora_targets(transformer: nn.Module) -> tuple[str, ...]:
    """Linear layers of attention and feed-forward in the repeated blocks, by their names there."""
    targets = set()
    for name, module in transformer.named_modules():
        inside = re.sub(r"^.*?\.\d+\.", "", name)  # blocks are numbered
        is_adapted = inside != name and _ADAPTED.search(inside) and not _NOT_ADAPTED.search(inside)
        if is_adapted and isinstance(module, nn.Linear):
            targets.add(inside)
    return tuple(sorted(targets))


def _names_of_blocks(transformer: nn.Module) -> list[str]:
    names = set()
    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList):
            names.update(type(block).__name__ for block in blocks)
    return sorted(names)


def _item_key(item: Item) -> Hashable:
    return item.prompt, item.size, tuple(map(image_digest, item.images))


def _tokens(latents: Any) -> torch.Tensor:
    """A pipeline's latents (B, L, C), (B, C, h, w) or (B, C, 1, h, w) as tokens (B, L, C)."""
    if isinstance(latents, list):
        latents = torch.stack(latents)
    return latents if latents.ndim == 3 else latents.flatten(2).transpose(1, 2)


def _with_noise(value: Any, noise: Any) -> Any:
    """What ``prepare_latents`` returns, with other noise."""
    return (noise, *value[1:]) if isinstance(value, tuple) else noise


def _joined(values: Sequence[Any]) -> Any:
    """What a pipeline computes of several texts, by what it computed of each."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values)) if first.shape[:1] == (1,) else first
    if isinstance(first, list) and len(first) == 1:  # an entry for each text
        return [value[0] for value in values]
    if isinstance(first, list | tuple):
        return type(first)(_joined(parts) for parts in zip(*values, strict=True))
    return first


def _signature(value: Any) -> Hashable:
    """Equal for values that ``_joined`` can join; tensors are on the CPU."""
    if isinstance(value, torch.Tensor):
        if value.shape[:1] == (1,):
            return value.shape
        digest = hashlib.blake2b(value.contiguous().flatten().view(torch.uint8).numpy())
        return value.shape, digest.digest()
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return value[0].shape
    if isinstance(value, dict):
        value = list(value.values())
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else repr(value)


def _shapes(values: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
