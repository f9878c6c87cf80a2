"""Loads the models of a pipeline, and puts them on their device."""

import logging
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import nn

from paco_judge.weights import from_pretrained_strict

logger = logging.getLogger(__name__)


def load_models(path: str | Path, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The pipeline's models by name.

    diffusers' own pipeline would also load models whose files lack tensors.
    """
    config = DiffusionPipeline.load_config(path)
    models = {}
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"):
        library, class_name = config.get(name, (None, None))
        if library is None:
            continue
        if library == "transformers":
            models[name] = from_pretrained_strict(
                getattr(transformers, class_name),
                path,
                subfolder=name,
                dtype=dtype,
                use_safetensors=True,  # reading a pickle runs its code
            )
            continue
        models[name] = _load_model(getattr(diffusers, class_name), path, name, dtype)
    return models


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
