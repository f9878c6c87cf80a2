"""A judge as the engine runs it: prompts and images are encoded once, many pairs share one padded forward.

Shapes: B requests, L tokens, D width, V vocabulary.
"""

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from paco_grpo.asgi import ApiError
from paco_grpo.images import check_total, decode, open_image
from paco_judge.weights import from_pretrained_strict
from vllm_server.transformers_engine.adapters import Adapters, load_adapters
from vllm_server.transformers_engine.cache import ByteCache
from vllm_server.transformers_engine.protocol import ChatRequest, image_bytes

logger = logging.getLogger(__name__)

SUPPORTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
_PROMPT_CACHE_BYTES = 64 << 20
_CHARACTERS_PER_TOKEN = 32  # more than any language has: a longer text is refused before it is tokenized
_DECODED_PIXELS = 1 << 24  # decoded at a time, over all requests of a batch; or one larger image
_VISION_PATCHES = 1 << 15  # in one pass of the vision tower
# Decoding releases the interpreter's lock.
_DECODERS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="engine-decode")


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    ids: torch.Tensor  # (L,) int64
    positions: torch.Tensor  # (3, L) int64: temporal, height, width (M-RoPE)
    image_slots: torch.Tensor  # (image tokens,) int64: where image features go
    next_position: int  # position of the first answer token

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return self.ids.nbytes + self.positions.nbytes + self.image_slots.nbytes


@dataclass(frozen=True)
class OpenedImage:
    """An image whose header was read."""

    image: Image.Image
    patches: int  # that it will have

    @property
    def pixels(self) -> int:
        """As it is in the file; the processor may make it smaller."""
        return self.image.width * self.image.height


@dataclass(frozen=True)
class EncodedImage:
    """An image after the vision tower."""

    grid: tuple[int, int, int]  # patches: time, height, width
    features: torch.Tensor  # (image tokens, (1 + deepstack layers) D), on the model's device

    @property
    def patches(self) -> int:
        """Before merging."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Prepared:
    """A request ready for the forward."""

    prompt: Prompt
    features: tuple[torch.Tensor, ...]  # those of its images; shared with the cache
    adapter: str | None  # None: the base

    def __len__(self) -> int:
        return len(self.prompt.ids)


class JudgeModel:
    """Model, processor and caches.

    ``prepare`` (vision tower) runs on one thread and the forwards (``first_token_logprobs``, ``prefill``, ``decode``:
    language model) on one, which may be another.

    Args:
        adapters: peft's key of each adapter in ``model``, by served name.
    """

    def __init__(self, model, processor, max_model_len: int, image_cache_bytes: int, adapters: Mapping[str, str]):
        self.model, self.processor, self.tokenizer = model, processor, processor.tokenizer
        self.device, self.max_model_len = model.device, max_model_len
        self._merged = model.config.vision_config.spatial_merge_size**2
        self._prompts, self._images = ByteCache(_PROMPT_CACHE_BYTES), ByteCache(image_cache_bytes)
        eos = model.generation_config.eos_token_id
        eos = [*(eos if isinstance(eos, list) else [eos]), self.tokenizer.eos_token_id]
        self.eos_ids = frozenset(token for token in eos if token is not None)
        self._vision_adapters = Adapters([model.model.visual], adapters)
        self._text_adapters = Adapters([model.model.language_model, model.lm_head], adapters)
        _last_position_only(model.model.language_model)

    @classmethod
    def load(
        cls, path: str, max_model_len: int, image_cache_mb: int = 512, adapters: Mapping[str, str] | None = None
    ) -> "JudgeModel":
        """Loads a local folder or a hub name; bfloat16 as stored on a GPU, float32 on a CPU.

        Args:
            adapters: LoRA folder of each adapter by its served name.

        Raises:
            ValueError: For a model of another kind, incomplete weights, or an adapter that does not fit.
            OSError: With transformers' message, where there is no model.
        """
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"{path} is a {config.model_type!r} model; the transformers engine serves {', '.join(SUPPORTED)}. "
                "Use VLLM_ENGINE=vllm for others"
            )
        on_gpu = torch.cuda.is_available()
        model = from_pretrained_strict(AutoModelForImageTextToText, path, dtype="auto" if on_gpu else torch.float32)
        model = model.to("cuda" if on_gpu else "cpu").eval()
        keys = load_adapters(model, adapters or {})
        processor = AutoProcessor.from_pretrained(path)
        limit = getattr(config.get_text_config(), "max_position_embeddings", max_model_len)
        logger.info("%s on %s in %s, %d threads", path, model.device, model.dtype, torch.get_num_threads())
        return cls(model, processor, min(max_model_len, limit), image_cache_mb << 20, keys)

    @torch.inference_mode()
    def prepare(self, requests: list[ChatRequest]) -> list[Prepared | ApiError]:
        """Prepares requests together: new images of one adapter pass through the vision tower in one batch.

        A request is refused by its texts' length and its images' headers, before anything of it is decoded.
        """
        rows: list[Prepared | ApiError | None] = [None] * len(requests)
        for adapter in dict.fromkeys(request.adapter for request in requests):
            self._vision_adapters.use(adapter)
            cached_by = adapter if self._vision_adapters else None
            # Equal URLs are one image.
            keys = {
                index: [(cached_by, hashlib.blake2b(url.encode(), digest_size=20).digest()) for url in request.images]
                for index, request in enumerate(requests)
                if request.adapter == adapter
            }
            urls = {key: url for i in keys for key, url in zip(keys[i], requests[i].images, strict=True)}
            images = {key: image for key in urls if (image := self._images.get(key)) is not None}
            new = [key for key in urls if key not in images]
            images |= zip(new, _DECODERS.map(self._open, (urls[key] for key in new)), strict=True)
            for index, own in keys.items():
                rows[index] = self._refusal(requests[index], [images[key] for key in own])
            wanted = [key for index, own in keys.items() if rows[index] is None for key in own]
            images |= self._encode({key: images[key] for key in wanted if isinstance(images[key], OpenedImage)})
            for index, own in keys.items():
                rows[index] = rows[index] or self._prepare(requests[index], [images[key] for key in own])
        return rows

    def _open(self, url: str) -> OpenedImage | ApiError:
        """Reads the header of a data URL's image; an error is returned."""
        try:
            image = open_image(image_bytes(url))
            # Raises ValueError for proportions that the processor would refuse.
            patches = self.processor.image_processor.get_number_of_image_patches(image.height, image.width, {})
            return OpenedImage(image, patches)
        except ApiError as error:
            return error
        except ValueError as error:
            return ApiError(str(error), param="messages", code="invalid_image")

    def _refusal(self, request: ChatRequest, images: list) -> ApiError | None:
        """Why a request is not worth decoding; ``images``: opened, encoded (in the cache), or errors."""
        for image in images:
            if isinstance(image, ApiError):
                return image
        characters = sum(len(part) for _, parts in request.turns for part in parts if part)
        if characters > _CHARACTERS_PER_TOKEN * self.max_model_len:
            return _too_long(f"the texts have {characters} characters", self.max_model_len)
        try:
            check_total([image.image for image in images if isinstance(image, OpenedImage)])
        except ValueError as error:
            return ApiError(str(error), param="messages", code="invalid_image")
        tokens = sum(image.patches for image in images) // self._merged
        if tokens >= self.max_model_len:
            return _too_long(f"the images have {tokens} tokens", self.max_model_len)
        return None

    def _prepare(self, request: ChatRequest, images: list) -> Prepared | ApiError:
        for image in images:
            if isinstance(image, ApiError):
                return image
        try:
            prompt = self._prompt(request.turns, tuple(image.grid for image in images))
        except ApiError as error:
            return error
        answer = request.max_tokens or 1
        if len(prompt.ids) + answer > self.max_model_len:
            return ApiError(
                f"the prompt has {len(prompt.ids)} tokens and the answer {answer}; the model takes "
                f"{self.max_model_len} together (raise MAX_MODEL_LEN, or send smaller images)",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        return Prepared(prompt, tuple(image.features for image in images), request.adapter)

    @torch.inference_mode()
    def first_token_logprobs(self, batch: list[Prepared]) -> torch.Tensor:
        """Log-probabilities (B, V) float32 of the first answer token: one forward, nothing is generated."""
        return self._forward(batch, use_cache=False)[0]

    @torch.inference_mode()
    def prefill(self, batch: list[Prepared]):
        """First step of an answer: (log-probabilities (B, V), key-value cache, attention mask (B, L))."""
        return self._forward(batch, use_cache=True)

    @torch.inference_mode()
    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache, mask: torch.Tensor, adapter: str | None = None
    ) -> torch.Tensor:
        """One more token for each row: tokens (B,), positions (B,), mask (B, L) with the new tokens' column."""
        self._text_adapters.use(adapter)
        output = self.model.model.language_model(
            inputs_embeds=self.model.get_input_embeddings()(tokens[:, None]),
            attention_mask=mask,
            position_ids=positions[None, :, None].expand(3, -1, 1),
            past_key_values=cache,
            use_cache=True,
        )
        return self._logprobs(output)

    def _logprobs(self, output) -> torch.Tensor:
        """Log-probabilities (B, V) float32 at the last position."""
        return torch.log_softmax(self.model.lm_head(output.last_hidden_state[:, -1]).float(), dim=-1)

    def _prompt(self, turns: tuple, grids: tuple[tuple[int, int, int], ...]) -> Prompt:
        """``_tokenize``, cached."""
        prompt = self._prompts.get((turns, grids))
        if prompt is None:
            prompt = self._tokenize(turns, grids)
            characters = sum(len(part) for _, parts in turns for part in parts if part)
            self._prompts.put((turns, grids), prompt, prompt.nbytes + 4 * characters)
        return prompt

    def _tokenize(self, turns: tuple, grids: tuple[tuple[int, int, int], ...]) -> Prompt:
        messages = [
            {
                "role": role,
                "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
            }
            for role, parts in turns
        ]
        # A judge's first token is Yes or No: those that can think must not.
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        image_token = self.processor.image_token
        pieces = text.split(image_token)
        if len(pieces) != len(grids) + 1:
            raise ApiError(
                f"the prompt has {len(pieces) - 1} image places for {len(grids)} images: texts must not contain "
                f"{image_token}, and the model's chat template must accept images",
                param="messages",
            )
        counts = [time * height * width // self._merged for time, height, width in grids]
        text = pieces[0] + "".join(image_token * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
        ids = torch.tensor(self.tokenizer(text)["input_ids"], dtype=torch.int64)
        is_image = ids == self.model.config.image_token_id
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=is_image.int()[None],
            image_grid_thw=torch.tensor(grids, dtype=torch.int64) if grids else None,
        )
        return Prompt(ids, positions[:, 0], is_image.nonzero()[:, 0], int(positions.max()) + 1)

    def _encode(self, opened: Mapping[tuple, OpenedImage]) -> dict[tuple, EncodedImage | ApiError]:
        """Images by key, encoded together; an unreadable one is an error in its place."""
        results: dict[tuple, EncodedImage | ApiError] = {}
        keys, start = list(opened), 0
        for stop in _chunks([image.pixels for image in opened.values()], _DECODED_PIXELS):
            group = {key: opened[key].image for key in keys[start:stop]}
            decoded = dict(zip(group, _DECODERS.map(_decode, group.values()), strict=True))
            results |= {key: error for key, error in decoded.items() if isinstance(error, ApiError)}
            self._encode_decoded({key: image for key, image in decoded.items() if key not in results}, results)
            start = stop
        return results

    def _encode_decoded(self, images: Mapping[tuple, Image.Image], results: dict) -> None:
        if not images:
            return
        inputs = self.processor.image_processor(images=list(images.values()), return_tensors="pt")
        grids = inputs["image_grid_thw"]
        patches = torch.split(inputs["pixel_values"], grids.prod(-1).tolist())
        start = 0
        for stop in _chunks([len(rows) for rows in patches], _VISION_PATCHES):
            pixels = torch.cat(patches[start:stop]).to(self.device)
            output = self.model.model.get_image_features(pixels, grids[start:stop].to(self.device))
            # Qwen3-VL adds features of some vision layers (deepstack) after its first text layers.
            layers = [torch.cat(output.pooler_output), *(getattr(output, "deepstack_features", None) or ())]
            counts = [len(features) for features in output.pooler_output]
            for key, grid, features in zip(
                list(images)[start:stop],
                grids[start:stop].tolist(),
                torch.cat(layers, dim=-1).split(counts),
                strict=True,
            ):
                image = EncodedImage(tuple(grid), features.to(self.model.dtype).clone())
                results[key] = image
                self._images.put(key, image, image.features.nbytes)
            start = stop

    def _forward(self, batch: list[Prepared], use_cache: bool):
        """Left-padded forward of one adapter's rows: last log-probabilities (B, V), cache or None, mask (B, L)."""
        self._text_adapters.use(batch[0].adapter)
        longest = max(len(row) for row in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)  # padding is masked out: any token does
        mask = torch.zeros((len(batch), longest), dtype=torch.int64)
        positions = torch.zeros((3, len(batch), longest), dtype=torch.int64)
        rows, slots, features = [], [], []
        for index, row in enumerate(batch):
            start = longest - len(row)
            ids[index, start:] = row.prompt.ids
            mask[index, start:] = 1
            positions[:, index, start:] = row.prompt.positions
            rows.append(torch.full_like(row.prompt.image_slots, index))
            slots.append(row.prompt.image_slots + start)
            features += row.features
        ids, mask, positions = ids.to(self.device), mask.to(self.device), positions.to(self.device)
        embeds = self.model.get_input_embeddings()(ids)
        deepstack = {}
        if features:
            places = torch.cat(rows).to(self.device), torch.cat(slots).to(self.device)
            embeds[places], *layers = torch.cat(features).split(embeds.shape[-1], dim=-1)
            if layers:
                shown = torch.zeros_like(ids, dtype=torch.bool)
                shown[places] = True
                deepstack = {"visual_pos_masks": shown, "deepstack_visual_embeds": layers}
        output = self.model.model.language_model(
            inputs_embeds=embeds,
            # Without padding the plain causal kernel is exact and faster than one that reads a mask.
            attention_mask=None if all(len(row) == longest for row in batch) else mask,
            position_ids=positions,
            use_cache=use_cache,
            **deepstack,
        )
        return self._logprobs(output), output.past_key_values, mask


def _decode(image: Image.Image) -> Image.Image | ApiError:
    """An opened image as RGB; an error is returned."""
    try:
        return decode(image)
    except ValueError as error:
        return ApiError(str(error), param="messages", code="invalid_image")


def _too_long(what: str, limit: int) -> ApiError:
    message = f"{what}; the model takes {limit} tokens (raise MAX_MODEL_LEN, or send less)"
    return ApiError(message, param="messages", code="context_length_exceeded")


def _last_position_only(language_model) -> None:
    """Skips computation that only other positions' hidden states need: an answer is read from the last one.

    Keys and values of the last layer come from its input, which is complete; everything after its attention is
    computed for the last position and broadcast. This saves 2 % of the forward with 28 layers, 15 % with 3.
    """

    def last(module, args):
        return (args[0][:, -1:],)

    layer = language_model.layers[-1]
    out = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
    for module in (out, layer.post_attention_layernorm, language_model.norm):
        module.register_forward_pre_hook(last)


def _chunks(sizes: list[int], limit: int) -> list[int]:
    """Ends of consecutive groups whose sizes add up to at most ``limit`` (a single larger one is its own group)."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total and total + size > limit:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]
