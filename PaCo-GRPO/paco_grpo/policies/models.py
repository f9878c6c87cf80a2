"""Loads the models of a pipeline, and puts them on their device."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import nn

from paco_grpo.policies.base import PolicyLoadError
from paco_judge.weights import from_pretrained_strict

logger = logging.getLogger(__name__)


def load_models(path: str | Path, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The pipeline's models by name.

    diffusers' own pipeline would also load models whose files lack tensors, and pickles.

    Raises PolicyLoadError: A part of the pipeline is of another library.
    """
    models = {}
    for name, part_class in part_classes(DiffusionPipeline.load_config(path), path).items():
        if issubclass(part_class, transformers.PreTrainedModel):
            models[name] = from_pretrained_strict(
                part_class,
                path,
                subfolder=name,
                dtype=dtype,
                use_safetensors=True,  # reading a pickle runs its code
            )
        elif issubclass(part_class, diffusers.ModelMixin):
            models[name] = _load_model(part_class, path, name, dtype)
    return models


def part_classes(index: Mapping[str, Any], path: str | Path) -> dict[str, type]:
    """The classes of a pipeline's parts by name: models, tokenizers, the scheduler and others.

    Args:
        index: model_index.json of ``path``. The module of its pipeline is imported: some put
            classes into transformers.

    Raises PolicyLoadError: A class is not one of diffusers or transformers.
    """
    classes = {}
    for name, value in index.items():
        match value:
            case [str(library), str(class_name)] if not name.startswith("_"):
                pass
            case _:  # absent, or a number of the pipeline
                continue
        # A class may also lie beside the pipeline, in a module of diffusers.
        modules = {"diffusers": diffusers, "transformers": transformers}
        module = modules.get(library) or getattr(diffusers.pipelines, library, None)
        if not hasattr(module, class_name):
            raise PolicyLoadError(
                f"config.pretrained.model={path}: {name} is a {class_name} of {library}, but "
                f"PaCo-GRPO loads only classes of diffusers {diffusers.__version__} and "
                f"transformers {transformers.__version__}, and no code of a model's repository"
            )
        classes[name] = getattr(module, class_name)
    return classes


def _load_model(
    model_class: type[nn.Module], path: str | Path, name: str, dtype: torch.dtype
) -> nn.Module:
    """A diffusers model, all of whose tensors come from the files in ``path/name``.

    A warning names the tensors that the model does not use.
    """
    # The VAE is not rounded on the way to its float32: FLUX.2's normalization of latents is in it.
    model, info = model_class.from_pretrained(
        path,
        subfolder=name,
        dtype=torch.float32 if name == "vae" else dtype,
        output_loading_info=True,
        use_safetensors=True,
    )
    missing = set(info["missing_keys"])
    # diffusers believes the index of several files: a tensor that none of them has stays on "meta".
    missing |= {key for key, tensor in model.state_dict().items() if tensor.is_meta}
    if missing:
        raise ValueError(
            f"the weights in {path}/{name} lack the model's {', '.join(sorted(missing)[:5])}"
        )
    if extra := sorted(info["unexpected_keys"]):
        logger.warning(
            "diffusers %s does not use %d of the tensors in %s/%s: %s",
            diffusers.__version__,
            len(extra),
            path,
            name,
            ", ".join(extra[:5]),
        )
    return model


def place(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move, and cast where needed, since diffusers warns at each cast.

    A transformer may keep layers in float32, as Krea 2 its norms.
    """
    is_transformer = isinstance(module, diffusers.ModelMixin)
    kept = (module._keep_in_fp32_modules if is_transformer else None) or ()
    for name, parameter in module.named_parameters():
        if parameter.dtype != dtype and not any(part in kept for part in name.split(".")):
            nn.Module.to(module, dtype=dtype)
            break
    module.to(device)
