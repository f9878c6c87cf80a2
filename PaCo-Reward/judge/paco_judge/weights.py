"""Loading with transformers that refuses incomplete weights, which transformers itself fills with random values."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_complete(model_class: type, path: str | Path, **options: Any) -> "PreTrainedModel":
    """``model_class.from_pretrained(path, **options)``.

    Raises:
        ValueError: The files lack tensors of the model; the message names them.
    """
    model, report = model_class.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise ValueError(f"the weights in {path} lack {len(missing)} of the model's tensors: {shown}")
    return model
