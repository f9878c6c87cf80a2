"""Any flow-matching pipeline of diffusers as a policy: its own ``__call__``, stopped where needed.

A pipeline's call encodes the text, draws noise, makes its schedule, steps from noise to image and
decodes. A shallow copy of the pipeline runs that call with a scheduler of ours, so that it ends
where the loop begins (features, noise, schedule) or at the first step (the velocity at one σ), or
has no step (decoding). What it computes of texts and reference images is recorded once per item
and played back. The user's pipeline is not touched.
"""

import copy
import functools
import hashlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
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
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, image_digest
from paco_grpo.types import Conditioning, Item, to_device

_NOISE = "prepare_latents"
# Methods of pipelines whose results depend on texts, references and size, but for the noise.
_RECORDED = re.compile(r"encode_|prepare_\w*latents$")
# Options of calls that rewrite prompts or change the size of the image.
_SWITCHED_OFF = re.compile(r"rewrit|upsampling$|use_pe$|resolution_binning|auto_resize")
# Modules in the blocks of transformers whose linear layers get a LoRA, and those that do not.
_ADAPTED = re.compile(r"(attn|attention|ff|ffn|feed_forward|mlp|\w+_mlp)(_\w+)?\d*\.")
_NOT_ADAPTED = re.compile(r"norm|ada_?ln|modulation")
_REFERENCES = ("image", "images", "input_images")


class _Stop(Exception):
    """Ends a pipeline's call; ``value`` is what the caller wants of it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Scheduler(FlowMatchEulerDiscreteScheduler):
    """The pipeline's own schedule, or the steps ``times``, each (σ, time of the transformer)."""

    times: Sequence[tuple[float, float]] | None = None

    @override
    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        if self.times is None:
            super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
            return
        schedule = torch.tensor([*self.times, (0.0, 0.0)])
        self.sigmas = to_device(schedule[:, 0], device or "cpu")
        self.timesteps = to_device(schedule[:-1, 1], device or "cpu")
        self.num_inference_steps = len(self.times)

    @override
    def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Stop(model_output)


Key = tuple[str, Any, int]  # a method, its text or texts, and how many calls with these came before


@dataclass(frozen=True)
class Recording:
    """What a pipeline computed of one item before its loop."""

    item: Item
    results: Mapping[Key, Any]
    # Recordings of one signature differ only where there is a row for each text: they may share a
    # call.
    signature: Hashable


@dataclass
class RecordedConditioning(Conditioning):
    """The recordings of items, one a row."""

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
class _Recorder:
    """Keeps the results of a call's recorded methods; of ``prepare_latents`` without the noise."""

    results: dict[Key, Any] = field(default_factory=dict)
    noise: Any = None

    def result(self, key: Key, compute: Callable[[], Any]) -> Any:
        value = compute()
        self.results[key] = value
        if key[0] == _NOISE:
            self.noise, self.results[key] = _without_noise(value)
        return value


@dataclass
class _Player:
    """Plays ``recordings`` back, one for each text of a call.

    With ``latents`` in place of the noise, or else with noise of the call's size.
    """

    recordings: Sequence[Recording]
    latents: Any = None
    noise: Any = None

    def result(self, key: Key, compute: Callable[[], Any]) -> Any:
        name, texts, count = key
        if name == _NOISE and self.latents is None:
            value = compute()
            self.noise, _ = _without_noise(value)
            return value
        if not isinstance(texts, tuple) or len(texts) != len(self.recordings):
            texts = [texts] * len(self.recordings)
        parts = []
        for recording, text in zip(self.recordings, texts, strict=True):
            parts.append(recording.results[name, text, count])
        value = _joined(parts)
        if name == _NOISE:
            return self.latents if value is None else (self.latents, *value[1:])
        return value


class _Driven:
    """A pipeline's shallow copy whose recorded methods go through ``source``."""

    source: _Recorder | _Player
    calls: Counter[tuple[str, Any]]
    stops_before_loop: bool
    on: torch.device
    scheduler: _Scheduler

    # The pipeline's own is that of a component, which may be offloaded.
    _execution_device = device = property(lambda self: self.on)

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """The loop begins."""
        if self.stops_before_loop:
            raise _Stop(self.scheduler)
        return super().progress_bar(iterable, total)  # pyright: ignore


def _recorded(name: str, function: Callable) -> Callable:
    """The method ``name`` of a ``_Driven`` pipeline."""

    @functools.wraps(function)
    def method(self: _Driven, *args: Any, **kwargs: Any) -> Any:
        texts = ""
        if name.startswith("encode_"):
            texts = kwargs.get("prompt", args[0] if args else "")
        if isinstance(texts, list):
            texts = texts[0] if len(texts) == 1 else tuple(texts)
        count = self.calls[name, texts]
        self.calls[name, texts] += 1
        compute = functools.partial(function, self, *args, **kwargs)
        return self.source.result((name, texts, count), compute)

    return method


@functools.cache
def _driven(pipeline_class: type[DiffusionPipeline]) -> type:
    members = {}
    for name in dir(pipeline_class):
        function = inspect.getattr_static(pipeline_class, name)
        if _RECORDED.match(name) and isinstance(function, FunctionType):
            members[name] = _recorded(name, function)
    return type(pipeline_class.__name__, (_Driven, pipeline_class), members)


class GenericPolicy(DiffusersPolicy):
    """A pipeline that nobody wrote a policy for.

    Latents are tokens: the cells of an image. Samples with references have a call each, and so has
    each σ. ``generic_policy`` makes the class of a pipeline.
    """

    scale: ClassVar[str]  # the argument of the call that ``guidance_scale`` is
    scale_guides: ClassVar[bool]  # it is the scale of true CFG
    accepted: ClassVar[frozenset[str]]  # arguments of the call
    switched_off: ClassVar[tuple[str, ...]]
    references: ClassVar[str]  # the argument for reference images; "": none

    def __new__(cls, pipeline: DiffusionPipeline, settings: PolicySettings) -> Self:
        return super().__new__(cls if "scale" in vars(cls) else generic_policy(type(pipeline)))

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        has_text = self.negative_prompt is not None or not self.has_true_cfg
        self.uses_true_cfg = self.scale_guides and has_text and self.guidance_scale > 0
        self.lora_targets = _lora_targets(self.transformer)
        self._scheduler = _Scheduler.from_config(pipeline.scheduler.config)
        self._call_function = inspect.unwrap(self.pipeline_class.__call__)  # with gradients
        self._signatures: dict[Hashable, Hashable] = {}
        self._shares_calls: bool | None = None  # unknown
        self._example: Recording | None = None
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._latents_dtype = torch.float32
        self._times: dict[tuple[int, int], dict[float, float]] = {}
        self._schedules: dict[tuple[int, int, int], torch.Tensor] = {}

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Every model but the transformer and the VAE."""
        encoders = []
        for name, component in self.pipeline.components.items():
            if isinstance(component, nn.Module) and name not in ("transformer", "vae"):
                encoders.append(component)
        return encoders

    # --- one call ---------------------------------------------------------------------------------

    def _run(
        self,
        source: _Recorder | _Player,
        items: Sequence[Item],
        size: tuple[int, int],
        times: Sequence[tuple[float, float]] | None = None,
        **arguments: Any,
    ) -> Any:
        """What the call of a driven copy stops with, or returns.

        ``times``: the steps; None: the pipeline's own schedule, and stop where the loop begins.
        """
        driven = copy.copy(self.pipeline)
        driven.__class__ = _driven(self.pipeline_class)
        scheduler = copy.copy(self._scheduler)
        scheduler.times = times
        vars(driven).update(
            scheduler=scheduler,
            source=source,
            calls=Counter(),
            stops_before_loop=times is None,
            on=self.device,
            _progress_bar_config={"disable": True},
        )
        arguments = {
            **self.pipeline_arguments(items[0]),
            "num_inference_steps": 2,  # a schedule that ends above 0 needs two
            "output_type": "latent",
            "prompt": [item.prompt for item in items],
            **arguments,
        }
        arguments["height"], arguments["width"] = size
        if "negative_prompt" in arguments:
            arguments["negative_prompt"] = [arguments["negative_prompt"]] * len(items)
        try:
            return self._call_function(driven, **arguments)
        except _Stop as stop:
            return stop.value

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        arguments = super().pipeline_arguments(item)
        arguments |= dict.fromkeys(self.switched_off, False)
        if "max_area" in self.accepted:
            arguments["max_area"] = item.height * item.width
        if item.images:
            images = [image.convert("RGB") for image in item.images]
            arguments[self.references] = images if len(images) > 1 else images[0]
        return arguments

    @override
    def length_arguments(self, height: int, width: int) -> dict[str, int]:
        lengths = {"height": height, "width": width}
        if "max_sequence_length" in self.accepted:
            lengths["max_sequence_length"] = self.max_sequence_length
        return lengths

    @override
    def guidance_arguments(self, guided: bool = True) -> dict[str, object]:
        if not self.scale_guides:
            return {self.scale: self.guidance_scale}
        if not (guided and self.uses_true_cfg):
            return {self.scale: 0.0}  # no pipeline guides then, also where scales count from 0
        arguments: dict[str, object] = {self.scale: self.guidance_scale}
        if self.has_true_cfg:
            arguments["negative_prompt"] = self.negative_prompt
        return arguments

    # --- texts and references ---------------------------------------------------------------------

    @torch.no_grad()
    @override
    def encode(self, items: Sequence[Item], text_tokens: int | None = None) -> RecordedConditioning:
        length = text_tokens or self.max_sequence_length
        recordings: dict[Hashable, Recording] = {}
        rows = []
        with ExitStack() as copied:  # one transfer of the encoders for all that is not cached
            for item in items:
                key = (_item_key(item), length)
                if key not in recordings:
                    recordings[key] = self._recording(item, length, copied)
                rows.append(recordings[key])
        self._example = self._example or rows[0]
        return RecordedConditioning(rows)

    def _recording(self, item: Item, length: int, copied: ExitStack) -> Recording:
        key = _item_key(item)

        def compute() -> dict[Key, Any]:
            copied.enter_context(self._offloaded_text.on_device())
            copied.enter_context(self._offloaded_vae.on_device())
            recorder = self._recorded([item], length)
            if self._shares_calls is None and not item.images:
                self._shares_calls = self._has_rows(recorder, item, length)
            return recorder.results

        results = self._texts.get((key, length), compute)
        if key not in self._signatures:
            self._signatures[key] = _signature(results)
        on_device = tree_map_only(torch.Tensor, lambda x: x.to(self.device), results)
        return Recording(item, on_device, (_signature(results), length))

    def _recorded(self, items: Sequence[Item], length: int) -> _Recorder:
        recorder = _Recorder()
        (first, *_) = items
        lengths = {"max_sequence_length": length} if "max_sequence_length" in self.accepted else {}
        generator = [torch.Generator().manual_seed(0) for _ in items]
        self._run(recorder, items, first.size, generator=generator, **lengths)
        self._keep_shape(first.size, recorder.noise)
        return recorder

    def _has_rows(self, single: _Recorder, item: Item, length: int) -> bool:
        """Whether two texts in a call have the features of each, one after the other."""
        pair = self._recorded([item, item], length)
        joined = [_joined([value, value]) for value in single.results.values()]
        shapes = [leaf.shape for leaf in tree_leaves(joined) if isinstance(leaf, torch.Tensor)]
        of_pair = tree_leaves(list(pair.results.values()))
        return shapes == [leaf.shape for leaf in of_pair if isinstance(leaf, torch.Tensor)]

    @override
    def batch_key(self, item: Item) -> Hashable:
        """Equal where samples may share a call.

        Sharded transformers need the same number of forwards in each process: one a sample.
        """
        if item.images or isinstance(self.transformer, FSDPModule):
            return object()
        return item.height, item.width, self._signatures.get(_item_key(item))

    @override
    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """About the area ``resolution``² in the shape of ``item`` or its first image."""
        height, width = item.height, item.width
        if height is None or width is None:
            width, height = item.images[0].size
        scale = resolution / math.sqrt(height * width)
        multiple = self.size_multiple
        sides = [max(1, round(side * scale / multiple)) * multiple for side in (height, width)]
        return sides[0], sides[1]

    # --- schedule, noise, velocity, image ---------------------------------------------------------

    def _player(self, size: tuple[int, int]) -> _Player:
        """For what depends on the size alone: with any text."""
        if self._example is None:
            images = (Image.new("RGB", size[::-1], "gray"),) if self.needs_image else ()
            self.encode([Item(0, "", *size, references=images)])
        assert self._example is not None
        return _Player([self._example])

    @torch.no_grad()
    @override
    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """As the pipeline's call makes them."""
        key = (num_steps, height, width)
        if key not in self._schedules:
            player = self._player((height, width))
            with self._offloaded_vae.on_device():
                scheduler = self._run(
                    player,
                    [player.recordings[0].item],
                    (height, width),
                    num_inference_steps=num_steps,
                )
            sigmas = scheduler.sigmas.to("cpu", torch.float32)
            times = self._times.setdefault((height, width), {})
            times.update(zip(sigmas.tolist(), scheduler.timesteps.tolist(), strict=False))
            self._schedules[key] = sigmas
        return self._schedules[key].clone()

    def _time(self, sigma: float, size: tuple[int, int]) -> float:
        """What the transformer gets at σ: 1000σ, but where the pipeline rounds or shifts it."""
        if size not in self._times:
            self.sigmas(20, *size)
        times = self._times[size]
        if sigma in times:
            return times[sigma]
        sigmas = sorted(times)
        return float(np.interp(sigma, [0.0, *sigmas], [0.0, *(times[s] for s in sigmas)]))

    @torch.no_grad()
    @override
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        size = (height, width)
        noise = []
        with self._offloaded_vae.on_device():
            for seed in seeds:
                player = self._player(size)
                generator = torch.Generator().manual_seed(int(seed))
                self._run(player, [player.recordings[0].item], size, generator=generator)
                self._keep_shape(size, player.noise)
                noise.append(_tokens(player.noise))
        return to_device(torch.cat(noise), self.device)

    def _keep_shape(self, size: tuple[int, int], noise: torch.Tensor) -> None:
        self._shapes[size] = noise.shape[1:]
        self._latents_dtype = noise.dtype

    def _latents(self, tokens: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Tokens (B, L, C) in the shape that the pipeline draws."""
        if size not in self._shapes:
            self.initial_latents([0], *size)
        shape = self._shapes[size]
        return tokens if len(shape) == 2 else tokens.transpose(1, 2).unflatten(2, shape[1:])

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
        """One call for each σ, and for each signature or sample with references."""
        assert isinstance(conditioning, RecordedConditioning)
        groups: dict[Hashable, list[int]] = {}
        for row, value in enumerate(sigma.tolist()):
            recording = conditioning.recordings[row]
            shares = self._shares_calls and not recording.item.images
            group = (value, recording.signature if shares else row)
            groups.setdefault(group, []).append(row)
        velocities = {}
        for (value, _), rows in groups.items():
            recordings = [conditioning.recordings[row] for row in rows]
            part = latents if len(groups) == 1 else latents[rows]
            result = self._velocity(part, value, recordings, (height, width), guided)
            velocities.update(zip(rows, result.split(1), strict=True))
        if len(groups) == 1:
            return result
        return torch.cat([velocities[row] for row in range(len(latents))])

    def _velocity(
        self,
        latents: torch.Tensor,
        sigma: float,
        recordings: Sequence[Recording],
        size: tuple[int, int],
        guided: bool,
    ) -> torch.Tensor:
        steps = [(sigma, self._time(sigma, size))]
        player = _Player(recordings, self._latents(latents, size).to(self._latents_dtype))
        items = [recording.item for recording in recordings]
        arguments = {} if guided else self.guidance_arguments(guided=False)
        with self.autocast():
            velocity = self._run(player, items, size, steps, **arguments)
        return _tokens(velocity).float()

    @torch.no_grad()
    @override
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        images = []
        size = (height, width)
        with self._offloaded_vae.on_device():
            for row in latents.split(1):
                player = self._player(size)
                player.latents = self._latents(row, size)
                item = player.recordings[0].item
                output = self._run(player, [item], size, times=(), output_type="pil")
                images.append(output[0][0])
        return images

    @override
    def _forward(self, inputs: Any) -> torch.Tensor:
        raise NotImplementedError("the pipeline's own call makes the forwards")


@functools.cache
def generic_policy(pipeline_class: type[DiffusionPipeline]) -> type[GenericPolicy]:
    """The policy of ``pipeline_class``, by the arguments of its call.

    Raises:
        PolicyLoadError: It cannot be a policy, for a reason that its arguments show.
    """
    name = pipeline_class.__name__
    parameters = inspect.signature(pipeline_class.__call__).parameters
    missing = [argument for argument in ("prompt", "height", "width") if argument not in parameters]
    if missing:
        raise PolicyLoadError(
            f"{name} cannot be trained: its call takes no {' and no '.join(missing)}"
        )
    guidance = parameters.get("guidance_scale")
    is_embedded = False
    if "true_cfg_scale" in parameters:
        is_embedded = guidance is not None and guidance.default is not None
    scale = (
        "true_cfg_scale"
        if "true_cfg_scale" in parameters and not is_embedded
        else ("guidance_scale")
    )
    has_property = hasattr(pipeline_class, "do_classifier_free_guidance")
    scale_guides = not is_embedded and ("negative_prompt" in parameters or has_property)
    references = [argument for argument in _REFERENCES if argument in parameters]
    length = parameters.get("max_sequence_length")
    components = inspect.signature(pipeline_class.__init__).parameters
    tokenizers = [component for component in components if component.startswith("tokenizer")]
    off = [argument for argument in parameters if _SWITCHED_OFF.search(argument)]
    members = {
        "pipeline_class": pipeline_class,
        "family": name,
        "scale": scale,
        "scale_guides": scale_guides,
        "accepted": frozenset(parameters),
        "switched_off": tuple(off),
        "references": references[0] if references else "",
        "edits_images": bool(references),
        "needs_image": any(parameters[r].default is inspect.Parameter.empty for r in references),
        "several_images": bool(references),
        "has_true_cfg": scale_guides and "negative_prompt" in parameters,
        "text_limit": (length.default if length else None) or 512,
        "cuts_text": length is not None,
        "tokenizer_folder": tokenizers[-1] if tokenizers else "processor",
        "__doc__": f"``{name}``, driven through its own call.",
    }
    return type(f"Generic{name}", (GenericPolicy,), members)


def _lora_targets(transformer: nn.Module) -> tuple[str, ...]:
    """Linear layers of attention and feed-forward in the repeated blocks, by their names there."""
    targets = set()
    for name, module in transformer.named_modules():
        inside = re.sub(r"^.*?\.\d+\.", "", name)  # a block is numbered
        is_adapted = inside != name and _ADAPTED.match(inside) and not _NOT_ADAPTED.search(inside)
        if is_adapted and isinstance(module, nn.Linear):
            targets.add(inside)
    return tuple(sorted(targets))


def _item_key(item: Item) -> Hashable:
    return item.prompt, item.size, tuple(map(image_digest, item.images))


def _tokens(latents: Any) -> torch.Tensor:
    """Latents of a pipeline as tokens (B, L, C)."""
    if isinstance(latents, list):
        latents = torch.stack(latents)
    return latents if latents.ndim == 3 else latents.flatten(2).transpose(1, 2)


def _without_noise(value: Any) -> tuple[Any, Any]:
    """The noise that ``prepare_latents`` returns, and the rest of what it returns."""
    return (value[0], (None, *value[1:])) if isinstance(value, tuple) else (value, None)


def _joined(values: Sequence[Any]) -> Any:
    """What a pipeline computes of several texts, by what it computed of each."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values)) if first.shape[:1] == (1,) else first
    if isinstance(first, list) and len(first) == 1:  # a list with an entry for each text
        return [value[0] for value in values]
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(parts) for parts in zip(*values, strict=True))
    return first


def _signature(value: Any) -> Hashable:
    """Equal for values that ``_joined`` can join."""
    if isinstance(value, torch.Tensor):
        if value.shape[:1] == (1,):
            return value.shape
        digest = hashlib.blake2b(value.contiguous().view(torch.uint8).numpy().tobytes())
        return value.shape, digest.digest()
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return value[0].shape
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple(map(_signature, value.values()))
    return repr(value)
