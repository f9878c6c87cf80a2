"""Checks before anything expensive: packages, model, data sets, images, disk space."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from paco_judge.images import UnreadableImage, check_image
from paco_judge.json_io import parse
from paco_reward.datasets import load_examples
from paco_reward.errors import PacoRewardError

LISTED = 5  # of many broken images
WEIGHT_FILES = ("*.safetensors", "*.bin")


def check_training(config: dict[str, Any], log: Callable[[str], None]) -> None:
    """All checks for a training configuration; ``log`` takes one line of text at a time.

    Raises:
        PacoRewardError: The first check that fails.
    """
    check_packages(config)
    log(f"model: {check_model(config.get('model_name_or_path'))}")
    names = dataset_names(config.get("dataset")) + dataset_names(config.get("eval_dataset"))
    if not names:
        raise PacoRewardError("the configuration names no dataset; set dataset: NAME")
    files: dict[Path, str] = {}
    for name in dict.fromkeys(names):
        examples = load_examples(config.get("dataset_dir", "data"), name, config.get("media_dir"))
        if examples is None:
            log(f"dataset {name}: not a local ShareGPT file, left to LLaMA-Factory")
            continue
        log(f"dataset {name}: {len(examples)} examples")
        files.update({image: example.place for example in examples for image in example.images})
    check_images(files)
    log(f"images: {len(files)} files readable")
    check_disk(config)


def dataset_names(value: str | list[str] | None) -> list[str]:
    """The names in "a, b" or ["a", "b"] or None."""
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts if str(part).strip()]


def check_packages(config: dict[str, Any]) -> None:
    """Packages that single settings need, and the file of ``deepspeed``.

    Raises:
        PacoRewardError: A package or the file is missing.
    """
    trackers, deepspeed = config.get("report_to") or [], config.get("deepspeed")
    trackers = {trackers} if isinstance(trackers, str) else set(trackers)
    needed = dict.fromkeys(trackers & {"wandb", "tensorboard", "mlflow", "trackio"}, "report_to")
    needed |= {"swanlab": "use_swanlab"} if config.get("use_swanlab") else {}
    needed |= {"bitsandbytes": "quantization_bit"} if config.get("quantization_bit") in (4, 8) else {}
    needed |= {"deepspeed": "deepspeed"} if deepspeed else {}
    for package, key in needed.items():
        if importlib.util.find_spec(package) is None:
            raise PacoRewardError(f"{key} needs the package {package}: pip install {package}")
    if isinstance(deepspeed, str):
        try:
            parse(Path(deepspeed).read_bytes())
        except (OSError, ValueError) as error:
            raise PacoRewardError(f"deepspeed: {deepspeed} cannot be read ({error}); see config/deepspeed") from error


def check_model(name: str | None) -> str:
    """Describe a local model folder that can be loaded, or a name that the hub serves.

    Raises:
        PacoRewardError: No name, a missing or incomplete folder, or a name that cannot be fetched.
    """
    if not name:
        raise PacoRewardError("the configuration names no model; set model_name_or_path: FOLDER or hub NAME")
    path = Path(name).expanduser()
    if not path.is_dir():
        return _check_hub(name, "model", ("config.json",), ("model.safetensors", "model.safetensors.index.json"))
    if not (path / "config.json").is_file():
        raise PacoRewardError(f"model folder {path} has no config.json; is it the folder of a saved model?")
    if not any(True for pattern in WEIGHT_FILES for _ in path.glob(pattern)):
        raise PacoRewardError(f"model folder {path} holds no weights (*.safetensors); download it completely")
    return f"{path} (local folder)"


def check_adapter(name: str) -> str:
    """Describe a local adapter folder, or a name that the hub serves.

    Raises:
        PacoRewardError: A folder without an adapter, or a name that cannot be fetched.
    """
    path = Path(name).expanduser()
    if (path / "adapter_config.json").is_file():
        return f"{path} (local folder)"
    if path.exists():
        raise PacoRewardError(f"adapter folder {name} has no adapter_config.json; train one with `paco-reward train`")
    return _check_hub(name, "adapter", ("adapter_config.json",), ("adapter_model.safetensors",))


def _check_hub(name: str, what: str, *needed: tuple[str, ...]) -> str:
    """Check that the local cache or the hub has one of each group of needed files; asks once, without retries."""
    if Path(name).expanduser().is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise PacoRewardError(f"{what} folder {name} does not exist; name a folder or a hub NAME/NAME")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if all(any(isinstance(try_to_load_from_cache(name, file), str) for file in files) for files in needed):
            return f"{name} (local cache)"
        get_hf_file_metadata(hf_hub_url(name, needed[0][0]), timeout=10)
        return f"{name} (hub)"
    except (ValueError, OSError, httpx.HTTPError) as error:  # all errors of huggingface_hub are among them
        folder, reason = f"/path/to/{name.split('/')[-1]}", str(error).strip().split("\n")[0]
        raise PacoRewardError(
            f"{what} {name} is neither a local folder nor could it be fetched ({type(error).__name__}: {reason}); check "
            "the name, for a gated one accept its license and `hf auth login`, set HF_ENDPOINT to a mirror, or download "
            f"it elsewhere and name the folder: {folder}"
        ) from error


def check_images(files: dict[Path, str]) -> None:
    """Check that images can be read; ``files`` maps each one to the row that uses it.

    Raises:
        PacoRewardError: Counts the missing or broken files and names the first few.
    """
    with ThreadPoolExecutor(max_workers=min(8, (os.cpu_count() or 1) * 2)) as pool:
        problems = list(tqdm(pool.map(_image_problem, files), "images", len(files), disable=None, delay=2))
    broken = [f"{file} ({files[file]}: {problem})" for file, problem in zip(files, problems) if problem]
    if broken:
        raise PacoRewardError(
            f"{len(broken)} of {len(files)} images cannot be read, first: {'; '.join(broken[:LISTED])}"
        )


def _image_problem(file: Path) -> str | None:
    try:
        check_image(file)
    except UnreadableImage as error:
        return str(error)
    return None


def check_disk(config: dict[str, Any]) -> None:
    """Check that the checkpoints fit: a tenth of the model's weights each for LoRA, else four times the weights.

    Raises:
        PacoRewardError: Names the folder, the free space and the needed space.
    """
    output = Path(config.get("output_dir") or ".").absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    model = Path(str(config.get("model_name_or_path", ""))).expanduser()
    weights = sum(file.stat().st_size for pattern in WEIGHT_FILES for file in model.glob(pattern))
    size = weights or 16 * 2**30  # of a hub model not yet downloaded: Qwen2.5-VL-7B
    share = 0.1 if config.get("finetuning_type", "lora") == "lora" else 4.0
    saves = config.get("save_strategy", "steps") not in ("no", False)
    copies = (config.get("save_total_limit") or 10) + 1 if saves else 1
    needed = int(size * share * copies) + 2**24
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise PacoRewardError(
            f"{existing} has {free / 2**30:.1f} GiB free, checkpoints need about {needed / 2**30:.1f} GiB; free some, "
            "set output_dir elsewhere, or lower save_total_limit"
        )
