"""An evaluation that can be continued: what it depends on, and whether all of it is there."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from paco_grpo.atomic import write_atomically
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.hashing import hash_samples, hash_value
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import Reward
from paco_grpo.types import Item
from paco_judge.json_io import DamagedJson, parse_object


def is_complete(
    folder: Path,
    options: RunOptions,
    items: Sequence[Item],
    rewards: Mapping[str, Reward],
    adapter: Path | None,
) -> bool:
    """Whether ``folder`` holds all images and scores of this evaluation.

    If not, ``evaluation.json`` records what they depend on, so that only the same evaluation
    continues there.

    Raises:
        ConfigError: The folder holds images of another evaluation, or its record is damaged.
    """
    identity = _identity(options, items, rewards, adapter)
    record = folder / "evaluation.json"
    metrics = folder / "metrics.json"
    if record.exists() or any(folder.glob("[0-9]*.png")):
        earlier = _read_record(record)
        changed = [name for name in identity if earlier.get(name) != identity[name]]
        # The adapter's hash counts, not its place. Other rewards only change the scores.
        of_images = [name for name in changed if name not in ("adapter", "rewards")]
        if of_images:
            names = ", ".join(of_images)
            raise ConfigError(
                f"{folder} holds images with another {names}: choose another --output"
            )
        num_images = options.test.num_images or len(items)
        if (
            "rewards" not in changed
            and metrics.is_file()
            and _has_all_scores(folder, num_images, rewards)
        ):
            return True
    folder.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    write_atomically(record, json.dumps(identity, indent=1))
    return False


def _identity(
    options: RunOptions,
    items: Sequence[Item],
    rewards: Mapping[str, Reward],
    adapter: Path | None,
) -> dict[str, Any]:
    """Everything that changes images or scores; ``rewards`` alone changes only scores."""
    pretrained = options.pretrained
    identity: dict[str, Any] = {
        "model": str(pretrained.model),
        "weights": _weights_identity(str(pretrained.model)),
        "quantize": pretrained.quantize,
        "adapter": adapter,
        "adapter_sha256": _adapter_hash(adapter),
        "prompts": hash_value([_item_content(item, options.dataset) for item in items]),
        "guidance_scale": options.sample.guidance_scale,
        "negative_prompt": options.sample.negative_prompt,
        "attention": options.speed.attention,
        "compile": options.speed.compile,
    }
    for name in ("mixed_precision", "allow_tf32", "item_size", "max_sequence_length", "seed"):
        identity[name] = getattr(options, name)
    test = dataclasses.asdict(options.test)
    identity["test"] = {name: test[name] for name in test if not name.startswith("reward")}
    identity["rewards"] = {}
    for name, reward in rewards.items():
        arguments = {key: value for key, value in reward.kwargs.items() if key != "api_key"}
        identity["rewards"][name] = [arguments, reward.record]
    return json.loads(json.dumps(identity, default=str))


def _read_record(record: Path) -> dict[str, Any]:
    if not record.exists():
        return {}
    try:
        return parse_object(record.read_bytes())
    except (OSError, DamagedJson) as error:
        raise ConfigError(
            f"{record} is damaged ({error}), so it is unknown what made the images beside it: "
            "choose another --output"
        ) from error


def _has_all_scores(folder: Path, num_images: int, rewards: Mapping[str, Reward]) -> bool:
    """A damaged or incomplete file is as good as none: the images are scored again."""
    try:
        rows = read_rows(folder)
        for row in rows:
            if None in [row["rewards"][name] for name in rewards]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return len(rows) == num_images


def _item_content(item: Item, dataset: str) -> list[Any]:
    """What an evaluation takes from an item; of reference images, samples of the files' content."""
    names = item.metadata.get("images", [item.metadata.get("image")])
    files = []
    if item.num_references and isinstance(names, list):
        files = [Path(dataset) / str(name) for name in names]
    references = hash_samples(file for file in files if file.is_file())
    return [item.item_id, item.prompt, item.height, item.width, item.metadata, references]


def _weights_identity(model: str) -> str:
    """Samples of the weights in a folder, or the commit of a hub name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return hash_samples(sorted(folder.rglob("*.safetensors")))
    cached = try_to_load_from_cache(model, "model_index.json")
    return Path(cached).parent.name if isinstance(cached, str) else ""


def _adapter_hash(adapter: Path | None) -> str | None:
    if adapter is None:
        return None
    digest = hashlib.sha256()
    for file in sorted(adapter.iterdir()):
        if file.suffix == ".safetensors" or file.name == "adapter_config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()
