"""Local ShareGPT data sets, read as LLaMA-Factory reads them."""

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_judge.client import Pair
from paco_judge.images import load_image
from paco_judge.json_io import DamagedJson, lines, parse
from paco_judge.questions import DEFAULT_FORM, RequestForm
from paco_reward.errors import PacoRewardError

TAG = "<image>"
RESERVED = ("<|image_pad|>", "<|video_pad|>")  # stand for images in the models; in a text they end the training
DOWNLOAD = "hf download X-GenGroup/PaCo-Dataset --repo-type dataset --local-dir PaCo-Dataset"


@dataclass(frozen=True)
class Example:
    """One row of a data set: ``DATASET row N``, its messages' text and its image files."""

    place: str
    prompt: str
    answer: str
    images: tuple[Path, ...]

    @property
    def labeled(self) -> bool:
        """Whether the answer begins with Yes or No."""
        return self.answer.startswith(("Yes", "No"))


def load_examples(dataset_dir: str | Path, name: str, media_dir: str | Path | None = None) -> list[Example] | None:
    """All rows of a local ShareGPT data set (json or jsonl); None if it is another, which only LLaMA-Factory reads.

    Image paths are relative to ``media_dir`` (default: ``dataset_dir``) where such a file exists, else used as they are.

    Raises:
        PacoRewardError: A missing or unreadable file, an unknown name, a missing column, a text that holds an image
            token of the model, or a row whose number of images differs from its number of <image> tags.
    """
    folder = Path(dataset_dir)
    index = folder / "dataset_info.json"
    if not index.is_file():
        hint = f"download it: {DOWNLOAD}" if folder.name == "PaCo-Dataset" else "point dataset_dir at the data sets' folder"
        raise PacoRewardError(f"{index} does not exist; {hint}")
    infos = _read_json(index)
    if not isinstance(infos, dict):
        raise PacoRewardError(f"{index} is not a JSON object of data sets")
    if name not in infos:
        nearest = difflib.get_close_matches(name, infos, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise PacoRewardError(f"dataset {name} is not in {index}; {hint}known: {', '.join(sorted(infos))}")
    info = infos[name]
    parts = [info, info.get("columns", {}), info.get("tags", {})] if isinstance(info, dict) else [None]
    if not all(isinstance(part, dict) for part in parts) or not isinstance(info.get("file_name", ""), str):
        raise PacoRewardError(f"dataset {name} in {index}: it is an object with file_name, columns and tags")
    file, columns = folder / info.get("file_name", ""), info.get("columns", {})
    if not file.exists():
        raise PacoRewardError(f"dataset {name}: file {file} does not exist; see file_name in {index}")
    if file.suffix not in (".json", ".jsonl") or info.get("formatting") != "sharegpt":
        return None
    rows = _read_json(file)
    if not isinstance(rows, list) or not rows:
        raise PacoRewardError(f"dataset {name}: {file} holds no rows")
    media = Path(media_dir) if media_dir else folder
    return [_example(row, f"{name} row {i}", columns, info.get("tags", {}), media) for i, row in enumerate(rows)]


def _read_json(file: Path) -> Any:
    number, rows = 0, []
    try:
        if file.suffix != ".jsonl":
            return parse(file.read_bytes())
        for number, line in lines(file):
            rows.append(parse(line))
        return rows
    except (OSError, DamagedJson) as error:
        place = f"{file} line {number}" if number else f"{file}"
        raise PacoRewardError(f"{place} cannot be read: {error}") from error


def _example(row: Any, place: str, columns: dict[str, str], tags: dict[str, str], media: Path) -> Example:
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    user, assistant = tags.get("user_tag", "human"), tags.get("assistant_tag", "gpt")
    try:
        texts = [(message[role], message[content]) for message in row[columns.get("messages", "conversations")]]
        files = row[columns["images"]] if "images" in columns else []
    except (KeyError, TypeError) as error:
        raise PacoRewardError(
            f"dataset {place}: {error} is missing; see columns and tags of dataset_info.json"
        ) from error
    files = files if isinstance(files, list) else [files]
    if odd := [value for value in (*(text for _, text in texts), *files) if not isinstance(value, str) or "\0" in value]:
        raise PacoRewardError(f"dataset {place}: messages and images must be texts, not {str(odd[0])[:40]!r}")
    if held := [token for token in RESERVED if any(token in text for _, text in texts)]:
        raise PacoRewardError(f"dataset {place}: a text holds {held[0]}, which stands for an image in the model; remove it")
    prompt = "\n".join(text for who, text in texts if who == user)
    answers = [text for who, text in texts if who == assistant]
    if not answers or not prompt:
        raise PacoRewardError(f"dataset {place}: needs a message by {user!r} and one by {assistant!r}; see tags")
    found = sum(text.count(TAG) for _, text in texts)
    if found != len(files):
        raise PacoRewardError(f"dataset {place}: {found} {TAG} tags but {len(files)} images")
    paths = tuple(media / file if os.path.isfile(media / file) else Path(file) for file in files)
    return Example(place, prompt, answers[-1], paths)


def check_data(config: dict[str, Any], log: Callable[[str], None]) -> None:
    """Read the data sets of a training configuration; ``log`` takes what was found, a line at a time.

    Images must exist. A damaged one is reported by the training, which reads it.

    Raises:
        PacoRewardError: A data set cannot be read, or images are missing.
    """
    names = [name for key in ("dataset", "eval_dataset") for name in _names(config.get(key))]
    if not names:
        raise PacoRewardError("the configuration names no dataset; set dataset: NAME")
    for name in dict.fromkeys(names):
        examples = load_examples(config.get("dataset_dir", "data"), name, config.get("media_dir"))
        if examples is None:
            log(f"dataset {name}: not a local ShareGPT file, left to LLaMA-Factory")
            continue
        log(f"dataset {name}: {len(examples)} examples")
        if missing := [(file, example.place) for example in examples for file in example.images if not file.is_file()]:
            raise PacoRewardError(f"{len(missing)} images do not exist, first: {missing[0][0]} ({missing[0][1]})")
        if odd := [example for example in examples if not example.labeled]:
            log(
                f"WARNING: dataset {name}: {len(odd)} of {len(examples)} answers begin with neither Yes nor No, which the "
                f"judge is asked for; first: {odd[0].place}, {odd[0].answer[:40]!r}"
            )


def _names(value: str | list[str] | None) -> list[str]:
    """The names in "a, b" or ["a", "b"] or None."""
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts if str(part).strip()]


def pair_prefix(form: RequestForm) -> str:
    """What a pair's message begins with: <image><image>, each after its label."""
    return "".join(form.label(number) + TAG for number in (1, 2))


class FilePairs(Sequence[Pair]):
    """Pairs in files. Images are opened when a pair is taken and are not kept: data sets are larger than memory.

    Args:
        rows: The two files and the question of each pair.
    """

    def __init__(self, rows: Sequence[tuple[Path, Path, str]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Pair:
        """Raises UnreadableImage."""
        first, second, question = self.rows[index]
        return Pair(load_image(first), load_image(second), question)


def labeled_pairs(
    dataset_dir: str | Path, dataset: str, limit: int | None = None, form: RequestForm = DEFAULT_FORM
) -> tuple[FilePairs, list[bool]]:
    """Pairs of a local data set, and whether their answer begins with Yes.

    Raises:
        PacoRewardError: The data set cannot be read, or a row is not <image><image>QUESTION (with the labels of ``form``)
            with an answer that begins with Yes or No.
    """
    images = pair_prefix(form)
    examples = load_examples(dataset_dir, dataset)
    if examples is None:
        raise PacoRewardError(f"dataset {dataset} is not a local ShareGPT file; download it and set file_name")
    for example in examples[:limit]:
        if len(example.images) != 2 or not example.prompt.startswith(images):
            raise PacoRewardError(
                f"dataset {example.place}: a pair's message is {images}QUESTION with two images; see --image_labels"
            )
        if not example.labeled:
            raise PacoRewardError(
                f"dataset {example.place}: the answer begins with neither Yes nor No: {example.answer[:40]!r}"
            )
    rows = [(*example.images, example.prompt.removeprefix(images)) for example in examples[:limit]]
    return FilePairs(rows), [example.answer.startswith("Yes") for example in examples[:limit]]
