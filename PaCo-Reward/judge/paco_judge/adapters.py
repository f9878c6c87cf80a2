"""LoRA adapters of a judge: loading that says what it did, and refuses what does not fit."""

import json
import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paco_judge.errors import UserError
from paco_judge.hub import explain_missing
from paco_judge.weights import some_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
# Adapters that were trained with transformers before 4.52 name the layers as the published folders
# do.
_NEW_NAMES = {
    "^visual": "model.visual",
    r"^model(?!\.(language_model|visual))": "model.language_model",
}
_HUB_SNAPSHOT = re.compile(r"models--(.+?)/snapshots/[^/]+$")


def load_adapter(model: "torch.nn.Module", adapter: str | Path) -> "torch.nn.Module":
    """The model with a peft adapter. Logs how much of the model it changes.

    Raises:
        UserError: The adapter is missing, has no tensors, tensors that no layer takes, too few, or
            other shapes.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.utils import load_peft_weights
    from safetensors import SafetensorError

    folder = local_folder(adapter, ("adapter_*",))
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no adapter in PEFT's format: it has no {CONFIG}")
    try:
        tensors = load_peft_weights(str(folder), device="cpu", key_mapping=_NEW_NAMES)
        if not tensors:
            raise UserError(f"the adapter in {folder} has no tensors; train or copy it again")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            loaded = PeftModel.from_pretrained(model, str(folder), key_mapping=_NEW_NAMES)
    except (RuntimeError, UserWarning, SafetensorError) as error:
        raise UserError(f"the adapter in {folder} does not fit its base: {error}") from error
    taken = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    if untaken := sorted(set(tensors) - set(taken)):
        raise UserError(
            f"the adapter in {folder} has {len(untaken)} tensors for layers that its base lacks: "
            f"{some_of(untaken)}"
        )
    layers = [module for module in loaded.modules() if isinstance(module, LoraLayer)]
    _report(folder, layers, tensors)
    _warn_of_another_base(folder, str(getattr(model, "name_or_path", "")))
    return loaded


def _report(folder: Path, layers: Sequence, tensors: dict) -> None:
    """Log one line about an adapter that was loaded, and a warning if it changes nothing."""
    with_tensors = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    ranks = sorted({rank for layer in layers for rank in layer.r.values()})
    scales = sorted({scale for layer in layers for scale in layer.scaling.values()})
    logger.info(
        "adapter %s: %d of %d layers, %d tensors, rank %s, scale %s",
        folder,
        len(with_tensors),
        len(layers),
        len(tensors),
        _numbers(ranks),
        _numbers(scales),
    )
    # The update is B·A, and B is zero before training.
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_A" not in name):
        logger.warning("the adapter %s changes nothing: its lora_B are zero everywhere", folder)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _warn_of_another_base(folder: Path, model: str) -> None:
    trained_on = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    if not trained_on or not model or _is_same_model(trained_on, model):
        return
    logger.warning(
        "the adapter %s was trained on %s, but is applied to %s: if these are other weights, or "
        "have the adapter merged in already, the scores are wrong",
        folder,
        trained_on,
        model,
    )


def _is_same_model(first: str, second: str) -> bool:
    """Whether two names may mean the same weights: equal paths, or equal last parts.

    A folder is often a copy or a download of the model whose name the adapter has.
    """
    if Path(first).is_dir() and Path(second).is_dir() and Path(first).samefile(second):
        return True
    return _short_name(first) == _short_name(second)


def _short_name(model: str) -> str:
    """``Qwen2.5-VL-7B-Instruct`` of a hub name, a folder, or a folder of the hub's cache."""
    path = model.rstrip("/")
    if snapshot := _HUB_SNAPSHOT.search(path):
        path = snapshot[1].replace("--", "/")
    return path.rpartition("/")[2].casefold()


def local_folder(name: str | Path, patterns: Sequence[str]) -> Path:
    """A local folder, or the folder of a hub model's matching files, downloaded if necessary.

    Raises UserError.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    with explain_missing(name):
        return Path(snapshot_download(str(name), allow_patterns=list(patterns)))
