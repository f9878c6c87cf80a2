"""Loading with transformers that refuses incomplete weights, which transformers itself fills with random values.

    python -m paco_judge.weights MODEL [ADAPTER …]

checks a model by the headers of its files, and LoRA adapters on it by their values. Exit status 1 and one sentence for
wrong weights, 3 and the reason if they cannot be checked.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LORA = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")


class WrongWeights(ValueError):
    """Weights that do not make up their model."""


def from_pretrained_strict(model_class: type, path: str | Path, **options: Any) -> Any:
    """``model_class.from_pretrained(path, **options)``; with ``device_map="meta"`` it reads headers only.

    Raises WrongWeights: The files are damaged, lack tensors of the model, or have them in another shape.
    """
    from safetensors import SafetensorError

    try:
        model, report = model_class.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as error:
        raise WrongWeights(f"the weights in {path} are damaged ({error}): download or export them again") from error
    if missing := sorted(report["missing_keys"]):
        raise WrongWeights(f"the weights in {path} lack {len(missing)} of the model's tensors: {_some(missing)}")
    if other := sorted(report["mismatched_keys"]):
        shapes = [f"{name} is {_shape(found)} instead of {_shape(wanted)}" for name, found, wanted in other]
        raise WrongWeights(f"the weights in {path} do not fit the model of its config.json: {_some(shapes)}")
    return model


def check_adapter(
    tensors: Mapping[str, tuple[int, ...]], folder: str | Path, saved: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Whether a LoRA adapter's matrices are finite and come in pairs that fit the base. Raises WrongWeights, OSError.

    ``tensors``: the base's shapes by name; ``saved``: by the names in its files, which may be older.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(Path(folder) / "adapter_model.safetensors")
    except SafetensorError as error:
        raise WrongWeights(f"the adapter in {folder} is damaged ({error})") from error
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, value in sorted(weights.items()):
        if not (match := _LORA.fullmatch(name)):
            raise WrongWeights(f"the adapter in {folder} has a tensor that is not LoRA's: {name}; merge it")
        if not value.isfinite().all():
            raise WrongWeights(f"the adapter in {folder} has values that are not finite: {name}")
        pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tuple(value.shape)
    base = max(tensors, saved or {}, key=lambda names: len(pairs.keys() & names.keys()))
    if wrong := sorted(pairs.keys() - base.keys()):
        raise WrongWeights(f"the adapter in {folder} changes layers that its base lacks: {_some(wrong)}")
    for name, found in pairs.items():
        rank = found.get("A", (0,))[0]
        if len(base[name]) == 2 and found != {"A": (rank, base[name][1]), "B": (base[name][0], rank)}:
            raise WrongWeights(
                f"the adapter in {folder} does not fit its base: {name} is {_shape(base[name])}, and its matrices are "
                + ", ".join(f"lora_{part} {_shape(shape)}" for part, shape in found.items())
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def tensors_in(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors in a folder's safetensors files; nothing for a hub name."""
    from safetensors import safe_open

    found = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def main(path: str, *adapters: str) -> int:
    """Checks a model (a folder, or a name in the hub's cache) and adapters on it; the exit status."""
    try:
        if Path(path).is_dir():
            config = json.loads(Path(path, "config.json").read_text())
            if "quantization_config" in config or not config.get("architectures"):
                print("they are quantized, or config.json names no architecture")
                return 3
        import transformers
        from transformers.integrations import accelerate

        # transformers wants accelerate for any device_map, which the meta device does not need and vLLM does not bring.
        accelerate.is_accelerate_available = lambda *_: True
        model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
        model = from_pretrained_strict(model_class, path, device_map="meta", local_files_only=True)
        tensors = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for folder in adapters:
            check_adapter(tensors, folder, tensors_in(path))
    except WrongWeights as error:
        print(error)
        return 1
    except Exception as error:  # noqa: BLE001  (whatever transformers cannot build, vLLM may know)
        first, *_ = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {first[:200]}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
