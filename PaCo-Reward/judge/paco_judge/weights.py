"""Loads weights, whole or not at all, and says how to get missing ones."""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paco_judge.errors import UserError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# image_max_pixels of the judge's training configurations. Larger images are shrunk to it, in this
# process as by a server.
TRAINED_MAX_PIXELS = 2_097_152
EDGES = ("shortest_edge", "longest_edge")  # pixels, in spite of their names
# Adapters that were trained with transformers before 4.52 name the layers as the published folders
# do.
_NEW_NAMES = {
    "^visual": "model.visual",
    r"^model(?=\.(layers|embed_tokens|norm)\.)": "model.language_model",
}
_REMEDY = (
    ". Download them once with `hf download {0}` (if they are gated, first accept their license at "
    "https://huggingface.co/{0} and run `hf auth login`), or give a local folder. HF_ENDPOINT names "
    "a mirror of the hub, HF_HOME the folder of its cache."
)
_ABSENT = "they are not in the cache, and the hub cannot be reached" + _REMEDY


@contextmanager
def explain_missing(name: str | Path) -> Iterator[None]:
    """Say in one message why the weights ``name`` are neither in a folder, cached, nor on the hub.

    Errors about a folder that exists stay as they are.

    Raises:
        UserError: What is wrong, and what to do.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of OpenCLIP
        if isinstance(error, UserError) or Path(name).expanduser().is_dir():
            raise
        problem = _problem_of(error)
        if problem is None:
            raise
        raise UserError(f"the weights {name} are not available: {problem.format(name)}") from error


def _problem_of(error: BaseException | None) -> str | None:
    """What the hub's client said, at whatever depth of causes; None: it said nothing."""
    import httpx
    from huggingface_hub import errors

    problems = {
        errors.HFValidationError: "this is neither an existing folder nor a name on the hub, such "
        "as organization/model",
        errors.GatedRepoError: "they are gated, and the hub does not know that you accepted their "
        "license" + _REMEDY,
        errors.RepositoryNotFoundError: "there is no such folder, and the hub has no such model or "
        "hides it" + _REMEDY,
        errors.OfflineModeIsEnabled: "they are not in the cache, and HF_HUB_OFFLINE forbids asking "
        "the hub" + _REMEDY,
        errors.LocalEntryNotFoundError: _ABSENT,
        errors.EntryNotFoundError: "the hub's repository lacks a file" + _REMEDY,
        httpx.HTTPError: _ABSENT,
    }
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for kind, problem in problems.items():
        if any(isinstance(link, kind) for link in chain):
            return problem
    return None


def local_folder(name: str | Path, patterns: Sequence[str]) -> Path:
    """A local folder, or the folder of a hub model's matching files, downloaded if necessary.

    Raises UserError.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    with explain_missing(name):
        return Path(snapshot_download(str(name), allow_patterns=list(patterns)))


def from_pretrained_strict(model_class: type, path: str | Path, **options: Any) -> Any:
    """``model_class.from_pretrained(path, **options)``, complete or not at all.

    Raises UserError: They are not available, or tensors of the model are missing.
    """
    with explain_missing(path):
        model, report = model_class.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"the weights in {path} lack {len(missing)} of the model's tensors: {some_of(missing)}"
        )
    return model


def some_of(names: list[str]) -> str:
    """The first names of many, for a message."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def save_model(model: Any, folder: str | Path) -> None:
    """``model.save_pretrained(folder)`` with tensor names that vLLM and transformers read.

    The names of published models are transformers' default. For Qwen3.5, 5.5.4 makes them wrong:
    ``model.language_model.visual`` instead of ``model.visual``.
    """
    published_names = not model.config.model_type.startswith("qwen3_5")
    model.save_pretrained(folder, save_original_format=published_names)


def load_adapter(model: "torch.nn.Module", adapter: str | Path) -> "torch.nn.Module":
    """The model with a peft adapter. Logs how much of the model it changes.

    Raises:
        UserError: The adapter is missing, or has tensors that no layer takes, too few, other
            shapes, or values that are not finite.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.utils import load_peft_weights

    folder = local_folder(adapter, ("adapter_*",))
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not an adapter in PEFT's format: it has no {CONFIG}")
    loaded = with_adapter(model, folder)
    tensors = load_peft_weights(str(folder), device="cpu", key_mapping=_NEW_NAMES)
    taken = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    if untaken := sorted(set(tensors) - set(taken)):
        raise UserError(
            f"the adapter in {folder} has {len(untaken)} tensors for layers that its base lacks: "
            f"{some_of(untaken)}"
        )
    if broken := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise UserError(
            f"the adapter in {folder} has values that are not finite in {len(broken)} of its "
            f"{len(tensors)} tensors ({some_of(broken)}): its training diverged, or the file is "
            "damaged; use an earlier checkpoint"
        )
    layers = [module for module in loaded.modules() if isinstance(module, LoraLayer)]
    _report(folder, layers, tensors)
    _warn_of_another_base(folder, str(getattr(model, "name_or_path", "")))
    return loaded


def with_adapter(model: "torch.nn.Module", adapter: str | Path, **options: Any) -> Any:
    """``PeftModel.from_pretrained(model, adapter, **options)``, complete or not at all.

    Raises UserError: It lacks tensors, or has other shapes.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(adapter), key_mapping=_NEW_NAMES, **options)
    except (RuntimeError, UserWarning, SafetensorError) as error:
        raise UserError(f"the adapter in {adapter} does not fit its base: {error}") from error


def _report(folder: Path, layers: Sequence, tensors: dict) -> None:
    """Log one line about an adapter that was loaded, and a warning if it changes nothing."""
    with_tensors = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    logger.info("adapter %s: %d of %d layers", folder, len(with_tensors), len(layers))
    # The update is B·A, and B is zero before training.
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_A" not in name):
        logger.warning("the adapter %s changes nothing: its lora_B are zero everywhere", folder)


def _warn_of_another_base(folder: Path, model: str) -> None:
    """A folder is often a copy or a download, so only the last parts of the names count."""
    trained_on = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path") or ""
    names = {Path(name).name.casefold() for name in (trained_on, model) if name}
    if len(names) == 2:
        logger.warning(
            "the adapter %s was trained on %s, but is applied to %s: if these are other weights, "
            "or have the adapter merged in already, the scores are wrong",
            folder,
            trained_on,
            model,
        )


def image_limits(name: str | Path) -> dict[str, int] | None:
    """Fewest and most pixels of an image that the processor of a model or adapter lets through.

    None if its folder does not say: other kinds of processors limit the longest side.
    """
    folder = local_folder(name, PROCESSOR_FILES)
    for file in PROCESSOR_FILES:
        if (folder / file).is_file():
            settings = json.loads((folder / file).read_bytes())
            settings = settings.get("image_processor", settings)
            limits = dict(settings.get("size") or {})
            # The names before transformers 5 win, as in transformers.
            for edge, old_name in zip(EDGES, ("min_pixels", "max_pixels"), strict=True):
                limits[edge] = settings.get(old_name) or limits.get(edge)
            if all(map(limits.get, EDGES)):
                return {edge: limits[edge] for edge in EDGES}
    return None


def set_limits(processor: Any, limits: dict[str, int]) -> None:
    """Give the processor the limits of ``image_limits``."""
    # A new object, because processors without a size of their own share their class's.
    processor.image_processor.size = type(processor.image_processor.size)(**limits)


def lower_limits(processor: Any, max_pixels: int) -> None:
    """Shrink images of more pixels, and no others: a limit of the model's own is not raised.

    0, or a processor of another kind, which limits the longest side: nothing changes.
    """
    size = getattr(processor.image_processor, "size", None) or {}
    limits = {edge: size.get(edge) for edge in EDGES}
    if None not in limits.values() and 0 < max_pixels < limits["longest_edge"]:
        set_limits(processor, {edge: min(limit, max_pixels) for edge, limit in limits.items()})


def allowed_pixels() -> int:
    """VLLM_MAX_PIXELS, or ``TRAINED_MAX_PIXELS``; 0: as many as the model allows.

    Raises UserError.
    """
    text = os.environ.get("VLLM_MAX_PIXELS") or str(TRAINED_MAX_PIXELS)
    if not text.isdecimal():
        raise UserError(f"VLLM_MAX_PIXELS={text} must be a number of pixels; 0: the model's own")
    return int(text)
