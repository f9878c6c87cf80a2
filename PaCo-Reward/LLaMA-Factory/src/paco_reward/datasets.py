"""Local ShareGPT data sets, read as LLaMA-Factory reads them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import hash_value, read_json, read_json_rows
from paco_judge.images import load_image
from paco_judge.questions import DEFAULT_FORM, Pair, RequestForm
from paco_judge.verdict import verdict_of

TAG = "<image>"
RESERVED = ("<|image_pad|>", "<|video_pad|>")  # stand for images in the models
PLACEHOLDERS = (TAG, "<video>", "<audio>", *RESERVED)  # in a text, LLaMA-Factory takes them for it
DOWNLOAD = "hf download X-GenGroup/PaCo-Dataset --repo-type dataset --local-dir PaCo-Dataset"
UNPACK = "decompress.sh"  # comes with the authors' data set, whose images are in archives
# LLaMA-Factory's defaults where an entry of dataset_info.json has no columns or tags.
_COLUMNS = {"messages": "conversations"}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One row of a data set."""

    place: str  # DATASET row N
    prompt: str
    answers: tuple[str, ...]
    images: tuple[Path, ...]
    system: str | None = None

    @property
    def answer(self) -> str:
        """The first one."""
        return self.answers[0]

    @property
    def label(self) -> bool | None:
        """Whether the answer begins with Yes (True) or No (False); None: with neither."""
        return verdict_of(self.answer)


@dataclass(frozen=True)
class AnswerCounts:
    """How many answers begin with Yes, with No, and with neither."""

    yes: int
    no: int
    others: int = 0

    def __str__(self) -> str:
        text = f"{self.yes} Yes, {self.no} No"
        return f"{text}, {self.others} others" if self.others else text

    @property
    def are_all_one(self) -> bool:
        """Whether only one of Yes and No is there."""
        return (self.yes == 0) != (self.no == 0)

    def for_measures(self) -> str:
        """What to say of pairs that a judge is measured on."""
        note = "; one answer only: accuracy means little, no AUC"
        return f"{self}{note}" if self.are_all_one else str(self)


def load_examples(
    dataset_dir: str | Path, name: str, media_dir: str | Path | None = None
) -> list[Example] | None:
    """All rows of a local ShareGPT data set (json or jsonl); None: only LLaMA-Factory reads it.

    Image paths are relative to ``media_dir`` (default: ``dataset_dir``) where such a file exists,
    else used as they are.

    Raises:
        UserError: Names a file or a row that training could not use.
    """
    folder = Path(dataset_dir)
    info = _read_info(folder, name)
    file = folder / info.get("file_name", "")
    if file.suffix not in (".json", ".jsonl") or info.get("formatting") != "sharegpt":
        return None
    media = Path(media_dir or folder)
    examples = []
    for number, row in enumerate(read_json_rows(file)):
        place = f"{name} row {number}"
        try:
            examples.append(_example(row, place, info, media))
        except KeyError as error:
            raise UserError(
                f"dataset {place} has no {error}; dataset_info.json names its keys in columns and "
                "tags"
            ) from error
        except (TypeError, AttributeError, ValueError) as error:
            raise UserError(f"dataset {place}: {type(error).__name__}: {error}") from error
    if not examples:
        raise UserError(f"dataset {name}: {file} holds no rows")
    with_system = [example for example in examples if example.system]
    if with_system:
        logger.warning(
            "%d of %d rows have a system prompt, first %s: %.40r. The judge is always asked with "
            "that of its chat template",
            len(with_system),
            len(examples),
            with_system[0].place,
            with_system[0].system,
        )
    return examples


def _read_info(folder: Path, name: str) -> dict[str, Any]:
    """What ``dataset_info.json`` says about a data set."""
    index = folder / "dataset_info.json"
    if not index.is_file():
        hint = ""
        if folder.name == "PaCo-Dataset":
            hint = f"; download it and unpack its images: {DOWNLOAD} && {_unpack(folder)}"
        raise UserError(f"{index} does not exist{hint}")
    infos = read_json(index)
    if name not in infos:
        known = ", ".join(sorted(infos))
        raise UserError(f"dataset {name} is not in {index}; known: {known}")
    return infos[name]


def _example(row: Any, place: str, info: dict[str, Any], media: Path) -> Example:
    columns = info.get("columns", _COLUMNS)
    tags = info.get("tags", _TAGS)
    roles: list[str] = []
    texts: list[str] = []
    for message in row[columns["messages"]]:
        text = message[tags["content_tag"]]
        if any(token in text for token in RESERVED):  # it would end the training
            raise ValueError(f"a text holds {' or '.join(RESERVED)}; remove it")
        roles.append(message[tags["role_tag"]])
        texts.append(text)
    system = row.get(columns.get("system"))
    if roles and roles[0] == tags.get("system_tag"):
        system = texts.pop(0)
        roles.pop(0)
    asking = {tags.get("user_tag"), tags.get("observation_tag")}
    answering = {tags.get("assistant_tag"), tags.get("function_tag")}
    are_in_turn = asking.issuperset(roles[::2]) and answering.issuperset(roles[1::2])
    if not roles or len(roles) % 2 or not are_in_turn:  # LLaMA-Factory would leave the row out
        raise ValueError(
            f"its messages are of {', '.join(roles) or 'nobody'}, not of the user and the assistant "
            "in turn; see tags in dataset_info.json"
        )
    prompt = "\n".join(texts[::2])
    images = row.get(columns.get("images")) or []
    paths = []
    for image in images if isinstance(images, list) else [images]:
        file = media / image
        paths.append(file if file.is_file() else Path(image))
    num_tags = sum(text.count(TAG) for text in texts)
    if num_tags != len(paths):
        raise ValueError(f"{num_tags} times {TAG} in the messages, but {len(paths)} images")
    return Example(place, prompt, tuple(texts[1::2]), tuple(paths), system)


def check_data(config: dict[str, Any]) -> str:
    """Look through a training configuration's data before anything is loaded.

    Warns of answers that are no labels, and of rows that are not used.

    Returns:
        A hash of all rows, without the content of images.

    Raises:
        UserError: A data set is unusable, or images are missing.
    """
    contents = []
    folder = config.get("dataset_dir", "data")
    media = config.get("media_dir") or folder
    for key in ("dataset", "eval_dataset"):
        names = config.get(key) or []
        if isinstance(names, str):
            names = names.split(",")
        for name in names:
            examples = load_examples(folder, name.strip(), media) or []
            contents.append(examples)
            limit = config.get("max_samples")
            if limit and len(examples) > limit:
                logger.warning(
                    "%s: max_samples takes the first %d of %d rows", name, limit, len(examples)
                )
            _check_images(examples, Path(media))
            unlabeled = [example for example in examples if example.label is None]
            if unlabeled:
                first = unlabeled[0]
                logger.warning(
                    "%d answers begin with neither Yes nor No, which the judge is asked for: "
                    "%s, %r …",
                    len(unlabeled),
                    first.place,
                    first.answer[:40],
                )
    return hash_value(contents)


def _check_images(examples: Sequence[Example], folder: Path) -> None:
    missing = []
    for example in examples:
        for file in example.images:
            if not file.is_file():
                missing.append((file, example.place))
    if not missing:
        return
    file, place = missing[0]
    hint = ""
    if (folder / UNPACK).is_file():
        hint = f"; unpack the images once: {_unpack(folder)}"
    raise UserError(f"{len(missing)} images do not exist, first: {file} ({place}){hint}")


def _unpack(folder: Path) -> str:
    return f"(cd {folder} && bash {UNPACK})"


def pair_prefix(form: RequestForm) -> str:
    """What a pair's message begins with: <image><image>, each after its label."""
    return "".join(form.label(number) + TAG for number in (1, 2))


@dataclass(frozen=True)
class FilePairs(Sequence[Pair]):
    """Pairs that are opened when one is taken, and not kept: data sets are larger than memory."""

    rows: Sequence[tuple[Path, Path, str]]  # two images and a question

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Pair:
        first, second, question = self.rows[index]
        return Pair(load_image(first), load_image(second), question)


def labeled_pairs(
    dataset_dir: str | Path,
    dataset: str,
    form: RequestForm = DEFAULT_FORM,
    media_dir: str | Path | None = None,
) -> tuple[FilePairs, list[bool]]:
    """Pairs of a local data set (see ``load_examples``), and whether their answer begins with Yes.

    Raises:
        UserError: It is no local ShareGPT file, a row is no labeled pair, or images are missing.
    """
    examples = load_examples(dataset_dir, dataset, media_dir)
    if examples is None:
        raise UserError(
            f"dataset {dataset} needs file_name: a local .json or .jsonl file, and formatting: "
            "sharegpt, in dataset_info.json"
        )
    _check_images(examples, Path(media_dir or dataset_dir))
    prefix = pair_prefix(form)
    rows: list[tuple[Path, Path, str]] = []
    labels: list[bool] = []
    for example in examples:
        is_pair = len(example.images) == 2 and example.prompt.startswith(prefix)
        if not is_pair or example.label is None or len(example.answers) > 1:
            raise UserError(
                f"dataset {example.place}: a pair's message is {prefix}QUESTION with two images "
                "(see --image_labels), and its only answer begins with Yes or No"
            )
        rows.append((*example.images, example.prompt.removeprefix(prefix)))
        labels.append(example.label)
    counts = AnswerCounts(sum(labels), len(labels) - sum(labels))
    logger.info("%s: %s", dataset, counts.for_measures())
    return FilePairs(rows), labels
