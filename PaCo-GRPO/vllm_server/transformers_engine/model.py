"""A Qwen2.5-VL as the engine runs it: prompts prepared once, images encoded once, one padded forward for many pairs.

Shapes: B requests, L tokens, D width, V vocabulary.
"""

import io
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from vllm_server.transformers_engine.adapters import Adapters, load_adapters
from vllm_server.transformers_engine.protocol import ChatRequest, RequestError, image_bytes, image_key

logger = logging.getLogger(__name__)

SUPPORTED = ("qwen2_5_vl",)
_PROMPT_CACHE_ENTRIES = 8192
_MAX_PIXELS = 64_000_000  # of a decoded image: above it is not a picture to judge but an attack on memory
_VISION_PATCHES = 1 << 15  # in one pass of the vision tower
# Decoding releases the interpreter's lock: worth threads for photographs, not for panels of a few kilobytes.
_INLINE_BYTES = 1 << 18
_DECODERS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="engine-decode")


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt."""

    ids: torch.Tensor  # (L,) int64
    positions: torch.Tensor  # (3, L) int64: temporal, height, width (M-RoPE)
    image_slots: torch.Tensor  # (image tokens,) int64: where image features go
    next_position: int  # position of the first answer token


@dataclass(frozen=True)
class EncodedImage:
    """An image after the vision tower."""

    grid: tuple[int, int, int]  # patches: time, height, width
    features: torch.Tensor  # (image tokens, D), on the model's device


@dataclass(frozen=True)
class Prepared:
    """A request ready for the forward."""

    prompt: Prompt
    features: tuple[torch.Tensor, ...]  # (image tokens, D) of each of its images; shared with the cache
    adapter: str | None  # None: the base

    def __len__(self) -> int:
        return len(self.prompt.ids)


class LruCache:
    """Most recently used values up to a total weight. Used on one thread."""

    def __init__(self, capacity: int):
        self._capacity, self._weight = capacity, 0
        self._values: OrderedDict = OrderedDict()

    def get(self, key):
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key, value, weight: int = 1) -> None:
        previous = self._values.pop(key, None)
        self._weight += weight - (previous[1] if previous else 0)
        self._values[key] = (value, weight)
        while self._weight > self._capacity and len(self._values) > 1:
            self._weight -= self._values.popitem(last=False)[1][1]


class JudgeModel:
    """Model, processor and caches.

    ``prepare`` runs on one thread, the forwards (``first_token_logprobs``, ``prefill``, ``decode``) on one, which may be
    another: the first uses the vision tower, the others the language model.
    """

    def __init__(
        self, model, processor, max_model_len: int, image_cache_bytes: int, adapters: Mapping[str, str] | None = None
    ):
        self.model, self.processor = model, processor
        self.device = model.device
        self.max_model_len = max_model_len
        self.tokenizer = processor.tokenizer
        self._image_token = processor.image_token
        self._image_token_id = model.config.image_token_id
        self._merged = model.config.vision_config.spatial_merge_size**2
        self._prompts = LruCache(_PROMPT_CACHE_ENTRIES)
        self._images = LruCache(image_cache_bytes)
        pad = self.tokenizer.pad_token_id
        self._pad_id = pad if pad is not None else 0  # masked out: any id does
        self.eos_ids = _eos_ids(model, self.tokenizer)
        self._token_texts: dict[int, str] = {}
        self._vision_adapters = Adapters([model.model.visual], adapters or {})
        self._text_adapters = Adapters([model.model.language_model, model.lm_head], adapters or {})
        _last_position_only(model.model.language_model)

    @classmethod
    def load(
        cls, path: str, max_model_len: int, image_cache_mb: int = 512, adapters: Mapping[str, str] | None = None
    ) -> "JudgeModel":
        """Load a local folder or a hub name; bfloat16 as stored on a GPU, float32 on a CPU.

        ``adapters``: LoRA folders by the name under which each is asked for; they stay beside the base, unmerged.
        Raises ValueError for a model of another kind or an adapter that does not fit; OSError (with transformers'
        message) where there is none.
        """
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"{path} is a {config.model_type!r} model; the transformers engine serves {', '.join(SUPPORTED)}. "
                "Use VLLM_ENGINE=vllm for others"
            )
        on_gpu = torch.cuda.is_available()
        model = AutoModelForImageTextToText.from_pretrained(path, dtype="auto" if on_gpu else torch.float32)
        model = model.to("cuda" if on_gpu else "cpu").eval()
        keys = load_adapters(model, adapters or {})
        processor = AutoProcessor.from_pretrained(path)
        limit = getattr(config.get_text_config(), "max_position_embeddings", max_model_len)
        logger.info("%s on %s in %s, %d threads", path, model.device, model.dtype, torch.get_num_threads())
        return cls(model, processor, min(max_model_len, limit), image_cache_mb << 20, keys)

    def prepare(self, requests: list[ChatRequest]) -> list[Prepared | RequestError]:
        """Prepare requests together: new images pass through the vision tower in one batch."""
        rows: list[Prepared | RequestError | None] = [None] * len(requests)
        for adapter in dict.fromkeys(request.adapter for request in requests):
            indices = [index for index, request in enumerate(requests) if request.adapter == adapter]
            self._vision_adapters.use(adapter)
            for index, row in zip(indices, self._prepare([requests[index] for index in indices]), strict=True):
                rows[index] = row
        return rows

    def _prepare(self, requests: list[ChatRequest]) -> list[Prepared | RequestError]:
        """``prepare`` for requests of one adapter."""
        found: dict[tuple, EncodedImage | RequestError] = {}
        new: dict[tuple, str] = {}
        keys = [
            tuple((request.adapter if self._vision_adapters else None, image_key(url)) for url in request.images)
            for request in requests
        ]
        for request, request_keys in zip(requests, keys, strict=True):
            for key, url in zip(request_keys, request.images, strict=True):
                if key in found or key in new:
                    continue
                cached = self._images.get(key)
                if cached is None:
                    new[key] = url
                else:
                    found[key] = cached
        found |= self._encode_images(new)
        return [
            self._prepare_one(request, [found[key] for key in request_keys])
            for request, request_keys in zip(requests, keys, strict=True)
        ]

    def first_token_logprobs(self, batch: list[Prepared]) -> torch.Tensor:
        """Log-probabilities (B, V) float32 of the first answer token: one forward, nothing is generated."""
        hidden, _, _ = self._forward(batch, use_cache=False)
        return self.logprobs(hidden)

    def prefill(self, batch: list[Prepared]):
        """First step of an answer: (log-probabilities (B, V), key-value cache, attention mask (B, L))."""
        hidden, cache, mask = self._forward(batch, use_cache=True)
        return self.logprobs(hidden), cache, mask

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache, mask: torch.Tensor, adapter: str | None = None
    ) -> torch.Tensor:
        """One further token for each row: tokens (B,), positions (B,), mask (B, L) with the new tokens' column."""
        self._text_adapters.use(adapter)
        output = self.model.model.language_model(
            inputs_embeds=self.model.get_input_embeddings()(tokens[:, None]),
            attention_mask=mask,
            position_ids=positions[None, :, None].expand(3, -1, 1),
            past_key_values=cache,
            use_cache=True,
        )
        return self.logprobs(output.last_hidden_state[:, -1])

    def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, D) -> (B, V) float32."""
        return torch.log_softmax(self.model.lm_head(hidden).float(), dim=-1)

    def token_text(self, token: int) -> str:
        """The text of one token (with U+FFFD where it is a part of a character)."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self.tokenizer.decode([token])
        return text

    def text(self, tokens: list[int]) -> str:
        """The text of an answer, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _prepare_one(self, request: ChatRequest, images: list) -> Prepared | RequestError:
        for image in images:
            if isinstance(image, RequestError):
                return image
        try:
            prompt = self._prompt(request, tuple(image.grid for image in images))
        except RequestError as error:
            return error
        return Prepared(prompt, tuple(image.features for image in images), request.adapter)

    def _prompt(self, request: ChatRequest, grids: tuple[tuple[int, int, int], ...]) -> Prompt:
        key = (request.turns, grids)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._tokenize(request, grids)
            self._prompts.put(key, prompt)
        limit = self.max_model_len - (request.max_tokens or 1)
        if len(prompt.ids) > limit:
            raise RequestError(
                f"the prompt has {len(prompt.ids)} tokens and the answer {request.max_tokens or 1}; the model takes "
                f"{self.max_model_len} together (raise MAX_MODEL_LEN, or send smaller images)",
                "messages",
                code="context_length_exceeded",
            )
        return prompt

    def _tokenize(self, request: ChatRequest, grids: tuple[tuple[int, int, int], ...]) -> Prompt:
        messages = [
            {
                "role": role,
                "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
            }
            for role, parts in request.turns
        ]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pieces = text.split(self._image_token)
        if len(pieces) != len(grids) + 1:
            raise RequestError(
                f"the prompt has {len(pieces) - 1} image places for {len(grids)} images: texts must not contain "
                f"{self._image_token}, and the model's chat template must accept images",
                "messages",
            )
        counts = [time * height * width // self._merged for time, height, width in grids]
        text = pieces[0] + "".join(
            self._image_token * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
        )
        ids = torch.tensor(self.tokenizer(text)["input_ids"], dtype=torch.int64)
        is_image = ids == self._image_token_id
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=is_image.int()[None],
            image_grid_thw=torch.tensor(grids, dtype=torch.int64) if grids else None,
        )
        return Prompt(ids, positions[:, 0], is_image.nonzero()[:, 0], int(positions.max()) + 1)

    def _encode_images(self, urls: dict[tuple, str]) -> dict[tuple, EncodedImage | RequestError]:
        """Decode and encode new images, several in one pass; a bad one is an error of its own."""
        results: dict[tuple, EncodedImage | RequestError] = {}
        readable: dict[tuple, Image.Image] = {}
        large = sum(map(len, urls.values())) > _INLINE_BYTES
        for key, image in zip(urls, (_DECODERS.map if large else map)(_open_url, urls.values()), strict=True):
            (results if isinstance(image, RequestError) else readable)[key] = image
        if not readable:
            return results
        inputs = self.processor.image_processor(images=list(readable.values()), return_tensors="pt")
        grids = inputs["image_grid_thw"]
        patches = torch.split(inputs["pixel_values"], grids.prod(-1).tolist())
        start = 0
        for stop in _chunks([len(rows) for rows in patches], _VISION_PATCHES):
            pixels = torch.cat(patches[start:stop]).to(self.device)
            output = self.model.model.get_image_features(pixels, grids[start:stop].to(self.device))
            for key, grid, features in zip(
                list(readable)[start:stop], grids[start:stop].tolist(), output.pooler_output, strict=True
            ):
                image = EncodedImage(tuple(grid), features.to(self.model.dtype).clone())
                self._images.put(key, image, image.features.numel() * image.features.element_size())
                results[key] = image
            start = stop
        return results

    def _forward(self, batch: list[Prepared], use_cache: bool):
        """Left-padded forward of one adapter's rows: last hidden state (B, D), key-value cache or None, mask (B, L)."""
        self._text_adapters.use(batch[0].adapter)
        longest = max(len(row) for row in batch)
        ids = torch.full((len(batch), longest), self._pad_id, dtype=torch.int64)
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
        if features:
            embeds[torch.cat(rows).to(self.device), torch.cat(slots).to(self.device)] = torch.cat(features)
        output = self.model.model.language_model(
            inputs_embeds=embeds,
            # Without padding the plain causal kernel is exact and faster than one that reads a mask.
            attention_mask=None if all(len(row) == longest for row in batch) else mask,
            position_ids=positions,
            use_cache=use_cache,
        )
        return output.last_hidden_state[:, -1], output.past_key_values, mask


def open_image(data: bytes) -> Image.Image:
    """Decode an image file to RGB. Raises RequestError."""
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > _MAX_PIXELS:
            raise RequestError(f"an image has {image.width}x{image.height} pixels; at most {_MAX_PIXELS}", "messages")
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"an image cannot be read: {error}", "messages", code="invalid_image") from error


def _open_url(url: str) -> Image.Image | RequestError:
    try:
        return open_image(image_bytes(url))
    except RequestError as error:
        return error


def _last_position_only(language_model) -> None:
    """Leave out what only other positions' hidden states need: an answer is read from the last one.

    Keys and values of the last layer come from its input, which is whole; all that follows its attention is computed
    for the last position and broadcast. With 28 layers this saves 2 % of the forward, with 3 layers 15 %.
    """

    def last(module, args):
        return (args[0][:, -1:],)

    layer = language_model.layers[-1]
    for module in (layer.self_attn.o_proj, layer.post_attention_layernorm, language_model.norm):
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


def _eos_ids(model, tokenizer) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)
