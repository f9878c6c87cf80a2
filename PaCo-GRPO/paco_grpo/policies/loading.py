"""Find the policy class of a model folder (or hub name) and load it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from paco_grpo.policies.base import Policy, PolicyLoadError
from paco_grpo.policies.performance.quantize import missing_library
from paco_grpo.suggest import did_you_mean

# Pipeline class named in model_index.json -> "module:class", imported on use.
POLICIES: dict[str, str] = {
    "FluxPipeline": "paco_grpo.policies.flux:FluxPolicy",
    "FluxKontextPipeline": "paco_grpo.policies.flux_kontext:FluxKontextPolicy",
    "Flux2Pipeline": "paco_grpo.policies.flux2:Flux2Policy",
    "Flux2KleinPipeline": "paco_grpo.policies.flux2:Flux2KleinPolicy",
    "QwenImagePipeline": "paco_grpo.policies.qwen_image:QwenImagePolicy",
    "QwenImageEditPipeline": "paco_grpo.policies.qwen_image_edit:QwenImageEditPolicy",
    "QwenImageEditPlusPipeline": "paco_grpo.policies.qwen_image_edit_plus:QwenImageEditPlusPolicy",
    "StableDiffusion3Pipeline": "paco_grpo.policies.stable_diffusion_3:StableDiffusion3Policy",
    "ZImagePipeline": "paco_grpo.policies.z_image:ZImagePolicy",
}


def load_policy(
    model_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_sequence_length: int = 512,
    guidance_scale: float = 3.5,
    negative_prompt: str | None = None,
    quantize: str | None = None,
    image_positions: str = "mrope",
) -> Policy:
    """Load the generator at ``model_path`` with the policy registered for its pipeline class.

    Args:
        model_path: Diffusers pipeline folder, or a hub name such as ``black-forest-labs/FLUX.1-dev``.
        dtype: Computing precision of the transformer and the text encoders; the VAE stays float32.
        device: Where to put the model.
        max_sequence_length: Text tokens, 1 to 512 (Qwen-Image: 1024).
        guidance_scale: Embedded guidance (FLUX) or true CFG scale, depending on the model.
        negative_prompt: Turns on true CFG (Qwen-Image).
        quantize: Quantize the frozen transformer: ``nf4`` or ``int8``; see ``performance/quantize.py``.
        image_positions: ``mrope`` or ``stock``, for a text encoder that sees the reference image (Qwen-Image-Edit).

    Raises:
        PolicyLoadError: Missing folder, no ``model_index.json``, hub unreachable, unknown pipeline class, broken weights,
            or a negative prompt for a model without true CFG.
    """
    found = policy_class(model_path)
    if negative_prompt is not None and not found.has_true_cfg:
        raise PolicyLoadError(
            f"config.sample.negative_prompt={negative_prompt!r} is given, but the guidance of {model_path} is embedded, "
            "not true CFG: leave it at None"
        )
    options = {
        "dtype": dtype, "device": device, "max_sequence_length": max_sequence_length, "guidance_scale": guidance_scale,
        "negative_prompt": negative_prompt,
    }  # fmt: skip
    if quantize is not None:  # a user's policy class need not have this argument
        if problem := missing_library():
            raise PolicyLoadError(f"config.pretrained.quantize={quantize!r}: {problem}")
        options["quantize"] = quantize
    if found.text_sees_image:
        options["image_positions"] = image_positions
    return found.from_pretrained(model_path, **options)


def policy_class(model_path: str | Path) -> type[Policy]:
    """The class of the generator at ``model_path``, by ``_class_name`` of its ``model_index.json``; weights are not read.

    Raises:
        PolicyLoadError: The index cannot be read, or no policy is registered for the pipeline class.
    """
    with _reading(_small_file(model_path, "model_index.json"), "a diffusers pipeline index") as values:
        class_name = values["_class_name"]
    if class_name not in POLICIES:
        raise PolicyLoadError(
            f"{model_path} is a {class_name}, for which PaCo-GRPO has no policy.{did_you_mean(class_name, POLICIES)} Known "
            f"pipelines: {', '.join(sorted(POLICIES))}. Choose such a model, or add a policy file and register it in "
            "paco_grpo/policies/loading.py."
        )
    module, name = POLICIES[class_name].split(":")
    return getattr(importlib.import_module(module), name)


def size_multiple(model_path: str | Path) -> int:
    """``Policy.size_multiple`` of the generator at ``model_path``; weights are not read.

    Raises:
        PolicyLoadError: The VAE's configuration cannot be read.
    """
    with _reading(_small_file(model_path, "vae/config.json"), "the VAE's configuration") as values:
        return policy_class(model_path).size_multiple_with(values)


def fewest_steps(model_path: str | Path) -> int:
    """The smallest number of steps for which the schedule of the generator exists; weights are not read.

    Raises:
        PolicyLoadError: The scheduler's configuration cannot be read.
    """
    file = _small_file(model_path, "scheduler/scheduler_config.json")
    with _reading(file, "the scheduler's configuration") as values:
        return 2 if values.get("shift_terminal") else 1  # it fixes the last σ before 0


def transformer_bytes(model_path: str | Path) -> int:
    """Stored size of the transformer's weights, which are not read; 0 if they are one file (a small model) or their list
    cannot be loaded (loading reports the reason).

    Raises:
        PolicyLoadError: The list is damaged.
    """
    try:
        index = _small_file(model_path, "transformer/diffusion_pytorch_model.safetensors.index.json")
    except PolicyLoadError:
        return 0
    with _reading(index, "the list of the transformer's files") as values:
        return int(values["metadata"]["total_size"])


@contextmanager
def _reading(file: Path, what: str) -> Iterator[dict[str, Any]]:
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise PolicyLoadError(f"{file} is not {what} ({type(error).__name__}: {error}). Download it again.") from error


def _small_file(model_path: str | Path, name: str) -> Path:
    """The file ``name`` of a pipeline folder or hub repository.

    Raises:
        PolicyLoadError: It cannot be loaded.
    """
    file = local_folder(model_path, name, option="config.pretrained.model") / name
    if not file.is_file():
        raise PolicyLoadError(
            f"config.pretrained.model={model_path} has no {name}, so it is not a complete diffusers pipeline: give the "
            "folder that contains transformer/, vae/ and scheduler/"
        )
    return file


def local_folder(place: str | Path, *patterns: str, option: str) -> Path:
    """``place`` if it is a folder; otherwise the cached copy of that hub repository, with the files of ``patterns``.

    Raises:
        PolicyLoadError: It is neither; the message names ``option``.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(place), allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are one or the other
        raise PolicyLoadError(
            f"{option}: there is no folder {folder.absolute()}, and {place} cannot be had from the hub: {error}"
        ) from error
