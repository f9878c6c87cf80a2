"""LoRA on a policy's transformer: attach it, switch it inside a block, save it for PEFT and for plain diffusers.

The adapter is injected in place (peft), so the transformer keeps its class. Its weights are float32 for any base.
"""

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from paco_grpo.options import ConfigError
from paco_grpo.policies.base import Policy, PolicyLoadError, unwrap
from paco_grpo.policies.loading import local_folder
from paco_grpo.suggest import did_you_mean

logger = logging.getLogger(__name__)

TRAINED = "default"  # name of the trained adapter; snapshots have other names
START = "start"  # a frozen copy of the adapter that training started from

_PEFT_PREFIX = "base_model.model."  # of weights in PEFT's files

# Files of an adapter's folder in either format. Nothing else is read: peft alone would also take a pickle.
_DIFFUSERS = ("pytorch_lora_weights.safetensors",)
_PEFT = ("adapter_config.json", "adapter_model.safetensors")


def add_lora(
    policy: Policy,
    rank: int = 64,
    alpha: float = 128,
    targets: str | Sequence[str] = "default",
    lora_path: str | Path | None = None,
) -> None:
    """Put a trainable LoRA (gaussian A, zero B: no change yet) on the transformer of ``policy``.

    Args:
        policy: Changed in place, before the transformer is wrapped for several processes.
        rank: r ≥ 1.
        alpha: The update is alpha / r · B·A.
        targets: ``default`` (``policy.lora_targets``), ``attention`` (those of them in attention), suffixes, or a regular
            expression for whole names of linear layers.
        lora_path: Folder or hub name to start from, in diffusers or PEFT format, with rank, alpha and targets.

    Raises:
        PolicyLoadError: ``lora_path`` is missing, unreadable, made for another model, or not finite.
        ConfigError: A target names no linear layer.
    """
    transformer = unwrap(policy.transformer)
    if lora_path is None:
        names = _target_modules(policy, targets)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=names
        )
        transformer.add_adapter(config, TRAINED)
    else:
        folder = find_lora(lora_path)
        try:
            if all((folder / file).is_file() for file in _DIFFUSERS):
                policy.pipeline.load_lora_weights(str(folder), adapter_name=TRAINED)
            else:
                _load_peft(transformer, folder)
            weights = _weights(transformer)
        except (
            Exception
        ) as error:  # files with other bytes, types or shapes raise anything in peft and diffusers
            raise PolicyLoadError(
                f"config.train.lora_path: the LoRA at {folder} is damaged, or made for another model than "
                f"config.pretrained.model ({type(error).__name__}: {str(error)[:300]})"
            ) from error
        if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise PolicyLoadError(
                f"config.train.lora_path: the LoRA at {folder} is not finite in {', '.join(broken[:3])}"
            )
    _set_trainable(policy, TRAINED, True)
    for layer in _layers(policy):
        # Autocast casts for each linear layer; peft would first cast back to the adapter's float32.
        layer.cast_input_dtype_enabled = policy.dtype == torch.float32


def _target_modules(policy: Policy, targets: str | Sequence[str]) -> list[str]:
    """Names of the linear layers that ``targets`` of ``add_lora`` means; peft would also take other modules."""
    modules = unwrap(policy.transformer).named_modules()
    layers = [name for name, module in modules if isinstance(module, nn.Linear)]
    if targets == "default":
        targets = policy.lora_targets
    elif targets == "attention":
        targets = [target for target in policy.lora_targets if "att" in target]  # attn, attention
    elif isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        targets = [targets]
    if isinstance(targets, str):
        try:
            found = {targets: [name for name in layers if re.fullmatch(targets, name)]}
        except re.error as error:
            raise ConfigError(
                f"config.train.lora_targets={targets!r} is no regular expression: {error}"
            ) from error
    else:
        found = {
            target: [name for name in layers if f".{name}".endswith(f".{target}")]
            for target in targets
        }
    for target in (target for target, matches in found.items() if not matches):
        kinds = dict.fromkeys(
            m[1] for m in (re.fullmatch(r"\w+\.\d+\.(.+)", name) for name in layers) if m
        )
        near = did_you_mean(
            re.sub(r"[^\w.]", "", target).strip("."), ["default", "attention", *kinds]
        )
        raise ConfigError(
            f"config.train.lora_targets: {target!r} matches no linear layer of the transformer.{near} The layers of its "
            f"blocks: {', '.join(kinds)}"
        )
    return sorted({name for matches in found.values() for name in matches})


def remove_lora(policy: Policy) -> None:
    """Take the LoRA off again, before the transformer is sharded."""
    unwrap(policy.transformer).unload_lora()


def add_snapshot(policy: Policy, name: str) -> None:
    """Add a frozen copy of the trained LoRA as adapter ``name``."""
    transformer = unwrap(policy.transformer)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Already found a `peft_config`"
        )  # several adapters are intended
        transformer.add_adapter(copy.deepcopy(transformer.peft_config[TRAINED]), name)
    transformer.set_adapter(TRAINED)
    _set_trainable(policy, name, False)
    _set_trainable(policy, TRAINED, True)
    blend_snapshot(policy, name, decay=0.0)


@torch.no_grad()
def blend_snapshot(policy: Policy, name: str, decay: float) -> None:
    """copy ← decay·copy + (1 − decay)·trained, in place; ``decay`` in [0, 1]."""
    for copied, trained in zip(
        lora_parameters(policy, name), lora_parameters(policy, TRAINED), strict=True
    ):
        copied.lerp_(trained.to(copied.dtype), 1.0 - decay)


def lora_parameters(policy: Policy, name: str = "") -> list[nn.Parameter]:
    """The parameters of the adapter ``name``, or of all adapters, trainable or not."""
    found, adapter = unwrap(policy.transformer).named_parameters(), f"{name}." if name else ""
    return [p for key, p in found if f".lora_A.{adapter}" in key or f".lora_B.{adapter}" in key]


def _set_trainable(policy: Policy, name: str, trainable: bool) -> None:
    for parameter in lora_parameters(policy, name):
        parameter.data = parameter.data.float()
        parameter.requires_grad_(trainable)


def reference(policy: Policy) -> AbstractContextManager[None]:
    """The base model inside the block, or the adapter ``START`` where there is one, for forwards without gradient."""
    return snapshot(
        policy, START if START in getattr(unwrap(policy.transformer), "peft_config", {}) else None
    )


@contextmanager
def snapshot(policy: Policy, name: str | None) -> Iterator[None]:
    """The adapter ``name``, or none, instead of the trained one inside the block, for forwards without gradient."""
    layers = _layers(policy)
    active = [list(layer.active_adapters) for layer in layers]
    flags = [
        (parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()
    ]
    try:
        for layer in layers:
            if name is None:
                layer.enable_adapters(False)
            else:
                layer.set_adapter(name)
        yield
    finally:  # peft's switches change both
        for layer, names in zip(layers, active, strict=True):
            layer.enable_adapters(True)
            layer.set_adapter(names)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def merged(policy: Policy) -> Iterator[None]:
    """The active LoRA is part of the base weights inside the block, for cheaper forwards without gradient.

    They differ by rounding, in the base's precision. Afterwards the base weights have exactly the same bits: they are set
    aside, which takes memory for one more copy of the layers that have a LoRA.
    """
    # Weights that are sharded over processes stay as they are.
    layers = [
        layer for layer in _layers(policy) if not isinstance(layer.get_base_layer().weight, DTensor)
    ]
    saved = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        with torch.autocast(
            policy.device.type, enabled=False
        ):  # the product of A and B in their own precision
            for layer in layers:
                layer.merge(adapter_names=list(layer.active_adapters))
        yield
    finally:
        for layer, before in zip(layers, saved, strict=True):
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.detach().copy_(before)


def _layers(policy: Policy) -> list[BaseTunerLayer]:
    layers = [
        module
        for module in unwrap(policy.transformer).modules()
        if isinstance(module, BaseTunerLayer)
    ]
    if not layers:
        raise ValueError(
            "there is no LoRA to switch off: set config.use_lora = True or config.train.beta = 0"
        )
    return layers


def save_peft(policy: Policy, directory: str | Path) -> None:
    """Write PEFT's format, as ``PeftModel.from_pretrained(transformer, directory)`` reads it."""
    transformer = unwrap(policy.transformer)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(transformer.peft_config[TRAINED])
    config.inference_mode = True
    config.save_pretrained(directory)
    weights = {_PEFT_PREFIX + name: tensor for name, tensor in _weights(transformer).items()}
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def save_diffusers(policy: Policy, directory: str | Path) -> None:
    """Write a file for ``pipe.load_lora_weights(directory)``; rank and alpha are in its metadata."""
    transformer = unwrap(policy.transformer)
    metadata = transformer.peft_config[TRAINED].to_dict()
    metadata = {
        key: sorted(value) if isinstance(value, set) else value for key, value in metadata.items()
    }
    type(policy.pipeline).save_lora_weights(
        str(directory),
        transformer_lora_layers=_weights(transformer),
        transformer_lora_adapter_metadata=metadata,
    )


def find_lora(place: str | Path) -> Path:
    """The folder of an adapter, downloaded if ``place`` is a hub name. Raises a ``PolicyLoadError`` if there is none."""
    folder = local_folder(place, *_DIFFUSERS, *_PEFT, option="config.train.lora_path")
    if any(all((folder / file).is_file() for file in files) for files in (_DIFFUSERS, _PEFT)):
        return folder
    raise PolicyLoadError(
        f"config.train.lora_path: {place} has neither {_DIFFUSERS[0]} (diffusers) nor {' and '.join(_PEFT)} (PEFT)"
    )


def _weights(transformer: nn.Module) -> dict[str, torch.Tensor]:
    state = get_peft_model_state_dict(transformer, adapter_name=TRAINED)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _load_peft(transformer: nn.Module, folder: Path) -> None:
    config = LoraConfig.from_pretrained(str(folder))
    config.megatron_config = None  # peft would import a module that an adapter names
    config.inference_mode = False
    logger.info("LoRA from %s: rank %d, alpha %g", folder, config.r, config.lora_alpha)
    transformer.add_adapter(config, TRAINED)
    weights = {
        k.removeprefix(_PEFT_PREFIX): v
        for k, v in load_peft_weights(str(folder), device="cpu").items()
    }
    if (
        different := weights.keys()
        ^ get_peft_model_state_dict(transformer, adapter_name=TRAINED).keys()
    ):
        raise ValueError(f"only one of both has {', '.join(sorted(different)[:5])}")
    set_peft_model_state_dict(transformer, weights, adapter_name=TRAINED)
