"""Features of images by models that need no question: OpenCLIP and DreamSim.

Rewards and benchmarks load them here, from one copy of the weights. torch and the models' packages
are imported on use.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from paco_judge.errors import UserError
from paco_judge.weights import explain_missing

if TYPE_CHECKING:
    import torch

OPEN_CLIP = "ViT-H-14"
OPEN_CLIP_WEIGHTS = "laion2b_s32b_b79k"
DREAMSIM = "ensemble"
DREAMSIM_FOLDER = "~/.cache/dreamsim"


@dataclass(frozen=True)
class Encoder:
    """A model and how it encodes images."""

    model: Any
    preprocess: Callable[[Image.Image], "torch.Tensor"]  # an RGB image to its pixels
    encode: Callable[["torch.Tensor"], "torch.Tensor"]  # pixels (n, …) to features (n, …)
    device: str

    def unit_features(self, images: Sequence[Image.Image], batch_size: int) -> "torch.Tensor":
        """(n, C) float32 on the device; ``batch_size`` images are encoded at once."""
        import torch
        from torch.nn.functional import normalize

        pixels = torch.stack([self.preprocess(image.convert("RGB")) for image in images])
        features = []
        with torch.no_grad():
            for batch in pixels.split(batch_size):
                encoded = self.encode(batch.to(self.device)).flatten(1)
                features.append(normalize(encoded.float(), dim=-1))
        return torch.cat(features)


def open_clip_encoder(
    device: str, name: str = OPEN_CLIP, pretrained: str | None = OPEN_CLIP_WEIGHTS
) -> Encoder:
    """A model of the package open_clip, whose weights come from the hub.

    Args:
        device: Where the model is.
        name: OpenCLIP's name of the architecture.
        pretrained: OpenCLIP's tag, or a local file, of the weights.

    Raises:
        ImportError: The package is missing.
        UserError: The weights are not available.
    """
    import open_clip

    known: dict[str, Any] = {}
    if pretrained:
        known = open_clip.get_pretrained_cfg(name, pretrained)
    with explain_missing(known.get("hf_hub", "").rstrip("/") or name):
        loaded: Any = open_clip.create_model_and_transforms(
            name, pretrained=pretrained, device=device
        )
    model, _, preprocess = loaded
    model.eval()
    return Encoder(model, preprocess, model.encode_image, device)


def dreamsim_encoder(device: str, kind: str = DREAMSIM, folder: str = DREAMSIM_FOLDER) -> Encoder:
    """DreamSim (arXiv 2306.09344); 1 − cosine of two features is its distance.

    Args:
        device: Where the model is.
        kind: One of the package's names, such as ``ensemble`` or ``dino_vitb16``.
        folder: Of the weights, which the package downloads from its authors' release.

    Raises:
        ImportError: The package is missing.
        UserError: The weights are not available.
    """
    from dreamsim import dreamsim

    place = Path(folder).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    try:
        loaded: Any = dreamsim(
            pretrained=True, device=device, cache_dir=str(place), dreamsim_type=kind
        )
    except OSError as error:  # of the download
        raise UserError(
            f"the weights of DreamSim ({kind}) are not in {place} and were not downloaded: {error}"
        ) from error

    model, preprocess = loaded

    def without_batch(image: Image.Image) -> "torch.Tensor":
        return preprocess(image)[0]

    return Encoder(model, without_batch, model.embed, device)


def local_encoder() -> Encoder | None:
    """CLIP or DreamSim, if its weights are on this machine; nothing is downloaded."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if importlib.util.find_spec("open_clip") and _has_open_clip_weights():
        return open_clip_encoder(device)
    weights = Path(DREAMSIM_FOLDER).expanduser()
    if importlib.util.find_spec("dreamsim") and weights.is_dir() and any(weights.iterdir()):
        return dreamsim_encoder(device)
    return None


def _has_open_clip_weights() -> bool:
    import open_clip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    config = open_clip.get_pretrained_cfg(OPEN_CLIP, OPEN_CLIP_WEIGHTS)
    try:
        snapshot_download(config["hf_hub"].rstrip("/"), local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True
