"""Loading with transformers that refuses incomplete weights.

transformers itself fills them with random values.
    python -m paco_judge.weights MODEL

checks a model by the headers of its files. Exit status 1 and one sentence for wrong weights, 3 and
the reason if they cannot be checked.
"""

import json
import sys
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.hub import explain_missing


def from_pretrained_strict(model_class: type, path: str | Path, **options: Any) -> Any:
    """``model_class.from_pretrained(path, **options)``, complete or not at all.

    With ``device_map="meta"`` it reads headers only.

    Raises UserError: They are not available, a file is damaged or missing, or tensors of the model
    are missing or have another shape.
    """
    from safetensors import SafetensorError

    try:
        with explain_missing(path):
            model, report = model_class.from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (SafetensorError, FileNotFoundError) as error:  # not found: a shard that the index lists
        raise UserError(
            f"the weights in {path} are damaged or incomplete ({error}): download or export them "
            "again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"the weights in {path} lack {len(missing)} of the model's tensors: {some_of(missing)}"
        )
    if other := sorted(report["mismatched_keys"]):
        shapes = [
            f"{name} is {list(found)} instead of {list(wanted)}" for name, found, wanted in other
        ]
        raise UserError(
            f"the weights in {path} do not fit the model of its config.json: {some_of(shapes)}"
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


def main(path: str) -> int:
    """Check a model: a folder, or a name in the hub's cache. Returns the exit status."""
    try:
        if Path(path).is_dir() and "quantization_config" in json.loads(
            Path(path, "config.json").read_text()
        ):
            print("they are quantized")
            return 3
        import transformers
        from transformers.integrations import accelerate

        # transformers wants accelerate for any device_map, which the meta device does not need and
        # vLLM does not bring.
        accelerate.is_accelerate_available = lambda *_: True
        model_class = getattr(
            transformers, transformers.AutoConfig.from_pretrained(path).architectures[0]
        )
        from_pretrained_strict(model_class, path, device_map="meta", local_files_only=True)
    except UserError as error:
        print(error)
        return 1
    except Exception as error:  # noqa: BLE001  (whatever transformers cannot build, vLLM may know)
        first, *_ = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {first[:200]}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
