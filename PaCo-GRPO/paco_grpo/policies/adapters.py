"""A LoRA is attached to a policy's transformer, read from a file, and saved in two formats.

The adapter is injected in place (peft), so the transformer keeps its class. Its weights are float32
for any base. ``lora`` switches it.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import set_seed
from diffusers import DiffusionPipeline
from diffusers.loaders import SD3LoraLoaderMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.utils import convert_unet_state_dict_to_peft
from peft import LoraConfig, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy, PolicyLoadError
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.loading import local_folder
from paco_grpo.policies.lora import TRAINED
from paco_grpo.policies.speed import share_casts

logger = logging.getLogger(__name__)

LORA_PATH = "config.train.lora_path"

_PEFT_PREFIX = "base_model.model."  # of weights in PEFT's files

# Files of an adapter's folder in either format. Nothing else is read: peft alone would also take a
# pickle.
_DIFFUSERS = "pytorch_lora_weights.safetensors"
_PEFT = ("adapter_config.json", "adapter_model.safetensors")

# Values of ``init_lora_weights`` with which peft leaves the base model's weights as they are.
_KEEP_THE_BASE = ("true", "false", "gaussian", "orthogonal", "eva")


def add_lora(
    policy: Policy,
    rank: int = 64,
    alpha: float = 128,
    targets: str | Sequence[str] = "default",
    lora_path: str | Path | None = None,
    option: str = LORA_PATH,
) -> None:
    """Put a trainable LoRA (gaussian A, zero B: no change yet) on the transformer of ``policy``.

    Args:
        policy: Changed in place, before the transformer is wrapped for several processes.
        rank: r ≥ 1.
        alpha: The update is alpha / r · B·A.
        targets: ``default`` (``policy.lora_targets``), ``attention`` (those of them in attention),
            suffixes, or a regular expression for whole names of linear layers.
        lora_path: Folder or hub name to start from, in diffusers or PEFT format, with rank, alpha
            and targets.
        option: What the user wrote ``lora_path`` into; errors begin with it.

    Raises:
        PolicyLoadError: ``lora_path`` is missing, unreadable, or has tensors that no layer takes.
        ConfigError: A target names no linear layer.
    """
    transformer = policy.transformer
    if lora_path is None:
        names = _target_modules(policy, targets)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=names
        )
        transformer.add_adapter(config, TRAINED)
    else:
        _load(policy, find_lora(lora_path, option), option, TRAINED)
    lora.set_trainable(policy, TRAINED, True)
    _prepare_layers(policy)
    share_casts(transformer)


def add_frozen_lora(policy: Policy, name: str, place: str | Path, option: str) -> None:
    """Put the LoRA of a file beside the trained one, such as a teacher or a second reference.

    ``lora.using_adapter(policy, name)`` switches to it. Rank, alpha and layers are the file's.

    Args:
        policy: With a trained LoRA; changed in place, before the transformer is wrapped.
        name: Of no other adapter.
        place: As in ``find_lora``.
        option: What the user wrote ``place`` into; errors begin with it.

    Raises:
        PolicyLoadError: ``place`` is missing, unreadable, or of another model.
    """
    with lora.frozen_beside_trained(policy, name):
        _load(policy, find_lora(place, option), option, name)
    _prepare_layers(policy)


def _prepare_layers(policy: Policy) -> None:
    policy.transformer.eval()  # without the dropout that an adapter's configuration may name
    for layer in lora.lora_layers(policy):
        # Autocast casts for each linear layer; peft would first cast back to the adapter's float32.
        layer.cast_input_dtype_enabled = policy.dtype == torch.float32


def add_adapters(
    policy: Policy, options: RunOptions, snapshots: Iterable[str], frozen: Mapping[str, str]
) -> None:
    """Attach the trained LoRA and others beside it, or make the whole transformer trainable.

    Args:
        policy: Changed in place, before the transformer is wrapped for several processes.
        options: Of the run.
        snapshots: Names of the copies that the objective wants.
        frozen: Name → place of the LoRAs that the objective wants.
    """
    set_seed(options.seed % 2**32)  # the adapter's gaussian init is the same on every process
    if options.use_lora:
        train = options.train
        add_lora(policy, train.lora_rank, train.lora_alpha, train.lora_targets, train.lora_path)
    else:
        policy.transformer.requires_grad_(True)  # float32 where the strategy places them
        share_casts(policy.transformer)
    if options.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    if options.train.reference == "start":
        lora.add_snapshot(policy, lora.START)
    for name in snapshots:
        lora.add_snapshot(policy, name)
    for name, place in frozen.items():
        add_frozen_lora(policy, name, place, objective_adapter(name))


def objective_adapter(name: str) -> str:
    """How messages call the LoRA ``name`` of an objective (``Objective.adapters``)."""
    return f"config.train.loss_type: adapter {name!r}"


def _target_modules(policy: Policy, targets: str | Sequence[str]) -> list[str]:
    """Names of the linear layers that ``targets`` of ``add_lora`` means.

    peft alone would also take other modules, and not say that one of several targets has no layer.
    """
    modules = policy.transformer.named_modules()
    layers = [name for name, module in modules if isinstance(module, nn.Linear)]
    if targets == "default":
        targets = policy.lora_targets
    elif targets == "attention":
        targets = [target for target in policy.lora_targets if "att" in target]  # attn, attention
    elif isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        targets = [targets]
    if isinstance(targets, str):
        patterns = {targets: targets}
    else:
        patterns = {target: rf"(.*\.)?{re.escape(target)}" for target in targets}
    names = set()
    for target, pattern in patterns.items():
        matching = [name for name in layers if re.fullmatch(pattern, name)]
        if not matching:
            raise ConfigError(
                f"config.train.lora_targets: {target!r} matches no linear layer of the transformer"
            )
        names.update(matching)
    return sorted(names)


def save_peft(policy: Policy, directory: str | Path) -> None:
    """Write PEFT's format, as ``PeftModel.from_pretrained(transformer, directory)`` reads it."""
    transformer = policy.transformer
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(transformer.peft_config[TRAINED])
    config.inference_mode = True
    config.init_lora_weights = True  # how A and B began matters to nobody who loads them
    if isinstance(config.target_modules, set):  # in any order, and equal adapters have equal files
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    weights = {_PEFT_PREFIX + name: tensor for name, tensor in _weights(transformer).items()}
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def save_diffusers(policy: DiffusersPolicy, directory: str | Path) -> None:
    """Write a file for ``pipe.load_lora_weights(directory)``.

    A pipeline without that (LongCat-Image) needs
    ``pipe.transformer.load_lora_adapter(directory, use_safetensors=True)``.
    Many programs ignore alpha where it is only in the file's metadata. So each layer's scale is
    multiplied into its B, and the metadata has alpha = rank: the scale is 1 for every reader.
    """
    transformer = policy.transformer
    weights = _weights(transformer)
    for name, layer in transformer.named_modules():
        if isinstance(layer, BaseTunerLayer) and TRAINED in layer.scaling:
            weights[f"{name}.lora_B.weight"] *= layer.scaling[TRAINED]
    config = transformer.peft_config[TRAINED].to_dict()
    config |= {
        "lora_alpha": config["r"],
        "alpha_pattern": config["rank_pattern"],
        "use_rslora": False,
        "init_lora_weights": True,
    }
    metadata = {}
    for key, value in config.items():
        metadata[key] = sorted(value) if isinstance(value, set) else value
    _file_format(policy.pipeline).save_lora_weights(
        str(directory),
        transformer_lora_layers=weights,
        transformer_lora_adapter_metadata=metadata,
    )


def _file_format(pipeline: DiffusionPipeline) -> type[LoraBaseMixin]:
    """The pipeline's reader and writer of files; for one that has none, the plainest."""
    return type(pipeline) if isinstance(pipeline, LoraBaseMixin) else SD3LoraLoaderMixin


def find_lora(place: str | Path, option: str = LORA_PATH) -> Path:
    """An adapter: the folder of one in PEFT's format, or the file of one in diffusers'.

    Args:
        place: A file, a folder, a checkpoint, whose ``adapter`` is meant, or a hub name, which is
            downloaded. A folder in diffusers' format holds ``pytorch_lora_weights.safetensors``,
            or one .safetensors file of any name.
        option: What the user wrote ``place`` into; errors begin with it.

    Raises:
        PolicyLoadError: There is no adapter.
    """
    file = Path(place).expanduser()
    if file.suffix == ".safetensors" and file.is_file():
        return file
    folder = local_folder(place, "*.safetensors", "*adapter_config.json", option=option)
    if (folder / "adapter").is_dir():
        folder = folder / "adapter"
    if all((folder / name).is_file() for name in _PEFT):
        return folder
    files = sorted(folder.glob("*.safetensors"))
    if folder / _DIFFUSERS in files:
        return folder / _DIFFUSERS
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "no .safetensors file"
        raise PolicyLoadError(
            f"{option}: {place} has {names}; name the file of the adapter, or a folder with "
            f"{_DIFFUSERS} (diffusers) or {' and '.join(_PEFT)} (PEFT)"
        )
    return files[0]


def _state(transformer: nn.Module, name: str = TRAINED) -> dict[str, torch.Tensor]:
    """The adapter's tensors: ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``."""
    return get_peft_model_state_dict(transformer, adapter_name=name)


def _weights(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of ``_state`` on the CPU."""
    weights = {}
    for name, tensor in _state(transformer).items():
        weights[name] = tensor.detach().cpu().contiguous().clone()
    return weights


def _load(policy: Policy, place: Path, option: str, name: str) -> None:
    """Attach the adapter at ``place`` as ``name``, and say how much of the model it changes.

    Errors begin with ``option``.
    """
    try:
        if place.is_file():
            tensors = _load_diffusers(policy, place, name)
        else:
            tensors = _load_peft(policy.transformer, place, name)
        _require_same_tensors(tensors, _state(policy.transformer, name))
    except Exception as error:  # peft and diffusers raise anything for what does not fit
        raise PolicyLoadError(
            f"{option}: the LoRA at {place} is damaged, or made for another model than "
            f"config.pretrained.model ({type(error).__name__}: {str(error)[:600]})"
        ) from error
    log_adapter(policy, str(place), name)


def _require_same_tensors(in_file: Iterable[str], in_model: Iterable[str]) -> None:
    """Raise a ValueError that names tensors without a layer, or layers without tensors.

    Tensors of other adapters (DoRA, LoKr, biases) would be trained and saved by half.
    """
    factors = {name for name in in_model if name.endswith((".lora_A.weight", ".lora_B.weight"))}
    unused = sorted(set(in_file) - factors)
    missing = sorted(factors - set(in_file))
    if unused:
        raise ValueError(f"no layer takes {len(unused)} of its tensors: {', '.join(unused[:5])}")
    if missing:
        raise ValueError(f"it lacks {len(missing)} tensors: {', '.join(missing[:5])}")


def log_adapter(policy: Policy, source: str, name: str = TRAINED) -> None:
    """Log how many layers the adapter ``name`` has, and warn if it changes nothing.

    ``source`` is where it was read from.
    """
    layers = [layer for layer in lora.lora_layers(policy) if name in layer.scaling]
    logger.info("LoRA from %s: %d layers", source, len(layers))
    if not any(_changes_something(layer, name) for layer in layers):
        logger.warning("the LoRA from %s changes nothing: A·B is zero in each layer", source)


def _changes_something(layer: BaseTunerLayer, name: str) -> bool:
    a = layer.lora_A[name].weight
    b = layer.lora_B[name].weight
    return layer.scaling[name] != 0 and bool(a.any()) and bool(b.any())


def _load_peft(transformer: nn.Module, folder: Path, adapter: str) -> set[str]:
    """Returns the names of the file's tensors."""
    config = LoraConfig.from_pretrained(str(folder))
    config.megatron_config = None  # peft would import a module that an adapter names
    config.inference_mode = False
    _require_unchanged_base(config.init_lora_weights)
    config.init_lora_weights = True
    weights = {}
    for name, tensor in load_peft_weights(str(folder), device="cpu").items():
        weights[name.removeprefix(_PEFT_PREFIX)] = tensor
    transformer.add_adapter(config, adapter)
    _require_same_tensors(weights, _state(transformer, adapter))
    set_peft_model_state_dict(transformer, weights, adapter_name=adapter)
    return set(weights)


def _require_unchanged_base(initialization: bool | str) -> None:
    """Raise a ValueError for an adapter that belongs to a changed base model.

    PiSSA, OLoRA and others subtract their first product from the base's weights, when they are made
    and when they are loaded: the reference, the export and other adapters would be wrong.
    """
    if str(initialization).lower() not in _KEEP_THE_BASE:
        raise ValueError(
            f"init_lora_weights={initialization!r} changes the base model; convert the adapter by "
            "PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )


def _load_diffusers(policy: Policy, file: Path, adapter: str) -> set[str]:
    """Returns the names of the file's tensors.

    diffusers converts names in the style of ComfyUI, kohya and others.
    """
    with _diffusers_warnings() as lost:
        weights, *alphas, metadata = _file_format(policy.pipeline).lora_state_dict(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            return_alphas=True,  # only FLUX.1's pipelines look at it
            return_lora_metadata=True,
        )
    if lost:  # it warns of tensors that it has no place for
        raise ValueError(lost[0])
    prefix = "transformer."
    if metadata is not None:
        metadata.pop(f"{prefix}megatron_config", None)
        _require_unchanged_base(metadata.pop(f"{prefix}init_lora_weights", True))
    if not any(".lora_A." in name for name in weights):
        weights = convert_unet_state_dict_to_peft(weights)
    policy.transformer.load_lora_adapter(
        weights,
        network_alphas=alphas[0] if alphas else None,
        metadata=metadata,
        adapter_name=adapter,
        low_cpu_mem_usage=True,
    )
    return {name.removeprefix(prefix) for name in weights}


@contextmanager
def _diffusers_warnings() -> Iterator[list[str]]:
    """What diffusers warns of inside the block, whatever level its logger has."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    library = logging.getLogger("diffusers")
    level = library.level
    library.addHandler(handler)
    library.setLevel(min(level, logging.WARNING))
    try:
        yield messages
    finally:
        library.setLevel(level)
        library.removeHandler(handler)
