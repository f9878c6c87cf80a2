"""Checks before anything expensive: model, data sets, images, disk space. Each failure is one clear line."""

import difflib
import importlib.util
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_reward.errors import PacoRewardError

SHOWN = 5  # of many broken things, the first few are named
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Example:
    """One row of a data set: where it stands, its messages' text and its image files."""

    place: str
    prompt: str
    answer: str
    images: tuple[Path, ...]


def check_training(config: dict[str, Any], say: Any) -> None:
    """All checks for a training configuration. `say` takes one line of text at a time.

    Raises:
        PacoRewardError: the first check that fails.
    """
    check_packages(config)
    say(f"model: {check_model(config.get('model_name_or_path'))}")
    names = dataset_names(config.get("dataset")) + dataset_names(config.get("eval_dataset"))
    if not names:
        raise PacoRewardError("the configuration names no dataset; set dataset: NAME")
    seen: dict[Path, str] = {}
    for name in dict.fromkeys(names):
        examples = load_examples(config.get("dataset_dir", "data"), name, config.get("media_dir"))
        if examples is None:
            say(f"dataset {name}: not a local file, left to LLaMA-Factory")
            continue
        say(f"dataset {name}: {len(examples)} examples")
        seen.update({image: example.place for example in examples for image in example.images})
    check_images(seen)
    say(f"images: {len(seen)} files readable")
    check_disk(config)


def check_packages(config: dict[str, Any]) -> None:
    """Packages that single settings need, and the file that `deepspeed` names.

    Raises:
        PacoRewardError: names the setting and the command that installs what it needs.
    """
    report_to = config.get("report_to") or []
    trackers = [report_to] if isinstance(report_to, str) else list(report_to)
    needed = [
        (f"report_to: {name}", name) for name in trackers if name in ("wandb", "tensorboard", "mlflow", "trackio")
    ]
    needed += [("use_swanlab", "swanlab")] if config.get("use_swanlab") else []
    needed += [("quantization_bit", "bitsandbytes")] if config.get("quantization_bit") in (4, 8) else []
    needed += [("deepspeed", "deepspeed")] if config.get("deepspeed") else []
    for setting, package in needed:
        if importlib.util.find_spec(package) is None:
            raise PacoRewardError(f"{setting} needs the package {package}: pip install {package}")
    deepspeed = config.get("deepspeed")
    if isinstance(deepspeed, str):
        try:
            json.loads(Path(deepspeed).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            known = ", ".join(sorted(map(str, Path("config/deepspeed").glob("*.json")))) or "see config/deepspeed"
            raise PacoRewardError(f"deepspeed: {deepspeed} cannot be read ({error}); there are {known}") from error


def check_model(name: str | None) -> str:
    """A local model folder that can be loaded, or a name that the hub serves.

    Raises:
        PacoRewardError: nothing given, no such folder, an incomplete folder, or a name that cannot be fetched.
    """
    if not name:
        raise PacoRewardError("the configuration names no model; set model_name_or_path: FOLDER or hub NAME")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PacoRewardError(f"model folder {path} has no config.json; is it the folder of a saved model?")
        if not any(True for pattern in WEIGHT_FILES for _ in path.glob(pattern)):
            raise PacoRewardError(f"model folder {path} holds no weights (*.safetensors); download it completely")
        return f"{path} (local folder)"
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise PacoRewardError(f"model folder {name} does not exist; check model_name_or_path")
    return _check_hub(name, "model", ("config.json",), ("model.safetensors", "model.safetensors.index.json"))


def check_adapter(name: str) -> str:
    """A local adapter folder, or a name that the hub serves.

    Raises:
        PacoRewardError: no such folder, one without an adapter, or a name that cannot be fetched.
    """
    path = Path(name).expanduser()
    if (path / "adapter_config.json").is_file():
        return f"{path} (local folder)"
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise PacoRewardError(f"adapter folder {name} has no adapter_config.json; train one with `paco-reward train`")
    return _check_hub(name, "adapter", ("adapter_config.json",), ("adapter_model.safetensors",))


def _check_hub(name: str, what: str, *needed: tuple[str, ...]) -> str:
    """Whether the hub, or its local cache, has one of each group of needed files; asks once, without retries."""
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    local = f"or download it where the hub is reachable and name the folder: /path/to/{name.split('/')[-1]}"
    try:
        if all(any(isinstance(try_to_load_from_cache(name, file), str) for file in files) for files in needed):
            return f"{name} (local cache)"
        get_hf_file_metadata(hf_hub_url(name, needed[0][0]), timeout=10)
    except GatedRepoError as error:
        raise PacoRewardError(
            f"{what} {name} needs its licence accepted: log in with `hf auth login`, {local}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise PacoRewardError(
            f"{what} {name} is neither a local folder nor on the hub; check the name, {local}"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise PacoRewardError(
            f"{what} {name} cannot be fetched: the model hub is not reachable and it is not in the local cache; "
            f"set HF_ENDPOINT to a mirror you can reach, {local}"
        ) from error
    return f"{name} (hub)"


def dataset_names(value: Any) -> list[str]:
    """The names in "a, b" or ["a", "b"] or None."""
    if value is None:
        return []
    parts = value.split(",") if isinstance(value, str) else list(value)
    return [str(part).strip() for part in parts if str(part).strip()]


def load_examples(dataset_dir: str | Path, name: str, media_dir: str | Path | None = None) -> list[Example] | None:
    """Read a local ShareGPT data set as LLaMA-Factory would, with its columns checked; None if it is on the hub.

    Image paths are relative to media_dir (default: dataset_dir) where such a file exists, else taken as they are.

    Raises:
        PacoRewardError: no dataset_info.json, an unknown name, a missing or unreadable file, a missing column, a row
            whose number of images differs from its number of <image> tags.
    """
    folder = Path(dataset_dir)
    info = _dataset_info(folder, name)
    if "file_name" not in info:
        return None
    file = folder / info["file_name"]
    if not file.is_file():
        raise PacoRewardError(
            f"dataset {name}: file {file} does not exist; see file_name in {folder}/dataset_info.json"
        )
    if info.get("formatting", "alpaca") != "sharegpt":
        raise PacoRewardError(f"dataset {name}: formatting must be sharegpt, see {folder}/dataset_info.json")
    columns, tags = info.get("columns", {}), info.get("tags", {})
    messages, images = columns.get("messages", "conversations"), columns.get("images")
    if not images:
        raise PacoRewardError(f"dataset {name}: columns in {folder}/dataset_info.json names no images column")
    media = Path(media_dir) if media_dir else folder
    rows = _read_rows(file, name)
    return [_example(row, f"{name} row {i}", messages, images, tags, media) for i, row in enumerate(rows)]


def _dataset_info(folder: Path, name: str) -> dict[str, Any]:
    file = folder / "dataset_info.json"
    if not file.is_file():
        raise PacoRewardError(f"{file} does not exist; point dataset_dir at the folder that holds the data sets")
    try:
        infos = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PacoRewardError(f"{file} is not JSON: {error}") from error
    if name not in infos:
        nearest = difflib.get_close_matches(name, infos, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise PacoRewardError(f"dataset {name} is not in {file}; {hint}known: {', '.join(sorted(infos))}")
    return infos[name]


def _read_rows(file: Path, name: str) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line] if file.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise PacoRewardError(f"dataset {name}: {file} cannot be read: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise PacoRewardError(f"dataset {name}: {file} holds no rows")
    return rows


def _example(row: Any, place: str, messages: str, images: str, tags: dict[str, str], media: Path) -> Example:
    if not isinstance(row, dict):
        raise PacoRewardError(f"dataset {place}: not an object with columns {messages}, {images}")
    for column in (messages, images):
        if column not in row:
            raise PacoRewardError(f"dataset {place}: column {column!r} is missing; it has {', '.join(row)}")
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    user, assistant = tags.get("user_tag", "human"), tags.get("assistant_tag", "gpt")
    try:
        turns = [(message[role], message[content]) for message in row[messages]]
    except (KeyError, TypeError) as error:
        raise PacoRewardError(f"dataset {place}: a message lacks {role!r} or {content!r}; see tags") from error
    prompt = "\n".join(text for who, text in turns if who == user)
    answers = [text for who, text in turns if who == assistant]
    if not answers or not prompt:
        raise PacoRewardError(f"dataset {place}: needs a message by {user!r} and one by {assistant!r}; see tags")
    files = row[images] if isinstance(row[images], list) else [row[images]]
    if prompt.count("<image>") != len(files):
        raise PacoRewardError(f"dataset {place}: {prompt.count('<image>')} <image> tags but {len(files)} images")
    paths = tuple(media / file if (media / file).is_file() else Path(file) for file in files)
    return Example(place=place, prompt=prompt, answer=answers[-1], images=paths)


def check_images(files: dict[Path, str]) -> None:
    """Refuse unreadable images. `files` maps each image file to the row that uses it.

    Raises:
        PacoRewardError: names the first few files that are missing or broken, and counts them all.
    """
    with ThreadPoolExecutor(max_workers=min(8, (os.cpu_count() or 1) * 2)) as pool:
        problems = list(pool.map(_image_problem, files))
    broken = [(file, files[file], problem) for file, problem in zip(files, problems) if problem]
    if broken:
        first = "; ".join(f"{file} ({place}: {problem})" for file, place, problem in broken[:SHOWN])
        raise PacoRewardError(f"{len(broken)} of {len(files)} images cannot be read, first: {first}")


def _image_problem(file: Path) -> str | None:
    """What is wrong with an image file, or None. Decodes no pixels where the format has checksums."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.format == "PNG":
                image.verify()
            else:
                image.load()
    except FileNotFoundError:
        return "missing"
    except UnidentifiedImageError:
        return "not an image"
    except (OSError, SyntaxError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def check_disk(config: dict[str, Any]) -> None:
    """Refuse a run whose checkpoints would not fit.

    The size is estimated from the model's weight files: a LoRA checkpoint with its optimizer at one tenth of them,
    a full one at four times.

    Raises:
        PacoRewardError: names the folder, what is free and what is needed.
    """
    output = Path(config.get("output_dir") or ".").absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    model = Path(str(config.get("model_name_or_path", ""))).expanduser()
    weights = sum(file.stat().st_size for pattern in WEIGHT_FILES for file in model.glob(pattern))
    # A hub model not yet here: 16 GB, the size of Qwen2.5-VL-7B, which has to be stored as well.
    size = weights or 16 * 2**30
    share = 0.1 if config.get("finetuning_type", "lora") == "lora" else 4.0
    saves = config.get("save_strategy", "steps") not in ("no", False)
    copies = (config.get("save_total_limit") or 10) + 1 if saves else 1
    needed = int(size * share * copies) + 2**24
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise PacoRewardError(
            f"{existing} has {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} GiB are needed for checkpoints; "
            "free some, set output_dir elsewhere, or set save_total_limit lower"
        )
