"""Local ShareGPT data sets, read as LLaMA-Factory reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_judge.client import Pair
from paco_judge.images import load_image
from paco_judge.json_io import DamagedJson, lines, parse
from paco_judge.questions import DEFAULT_FORM, RequestForm
from paco_reward.errors import PacoRewardError

TAG = "<image>"
RESERVED = (
    "<|image_pad|>",
    "<|video_pad|>",
)  # stand for images in the models; in a text they end the training
DOWNLOAD = "hf download X-GenGroup/PaCo-Dataset --repo-type dataset --local-dir PaCo-Dataset"


@dataclass(frozen=True)
class Example:
    """One row of a data set."""

    place: str  # DATASET row N
    prompt: str
    answer: str
    images: tuple[Path, ...]

    @property
    def labeled(self) -> bool:
        return self.answer.startswith(("Yes", "No"))


def load_examples(
    dataset_dir: str | Path, name: str, media_dir: str | Path | None = None
) -> list[Example] | None:
    """All rows of a local ShareGPT data set (json or jsonl); None if it is another, which only LLaMA-Factory reads.

    Image paths are relative to ``media_dir`` (default: ``dataset_dir``) where such a file exists, else used as they are.
    Raises PacoRewardError, naming a file or a row that training could not use.
    """
    folder = Path(dataset_dir)
    index = folder / "dataset_info.json"
    if not index.is_file():
        hint = f"; download it: {DOWNLOAD}" if folder.name == "PaCo-Dataset" else ""
        raise PacoRewardError(f"{index} does not exist{hint}")
    infos = _read_json(index)
    if name not in infos:
        raise PacoRewardError(
            f"dataset {name} is not in {index}; known: {', '.join(sorted(infos))}"
        )
    info, examples = infos[name], []
    file = folder / info.get("file_name", "")
    if file.suffix not in (".json", ".jsonl") or info.get("formatting") != "sharegpt":
        return None
    for number, row in enumerate(_read_json(file)):
        try:
            examples.append(_example(row, f"{name} row {number}", info, Path(media_dir or folder)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PacoRewardError(
                f"dataset {name} row {number}: {type(error).__name__}: {error}"
            ) from error
    if not examples:
        raise PacoRewardError(f"dataset {name}: {file} holds no rows")
    return examples


def _read_json(file: Path) -> Any:
    try:
        return (
            [parse(line) for _, line in lines(file)]
            if file.suffix == ".jsonl"
            else parse(file.read_bytes())
        )
    except DamagedJson as error:
        raise PacoRewardError(f"{file} cannot be read: {error}") from error


def _example(row: Any, place: str, info: dict[str, Any], media: Path) -> Example:
    columns, tags = info.get("columns", {}), info.get("tags", {})
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    texts = [
        (message[role], message[content])
        for message in row[columns.get("messages", "conversations")]
    ]
    images = row[columns["images"]] if "images" in columns else []
    files = images if isinstance(images, list) else [images]
    if held := [token for token in RESERVED if any(token in text for _, text in texts)]:
        raise ValueError(
            f"a text holds {held[0]}, which stands for an image in the model; remove it"
        )
    prompt = "\n".join(text for who, text in texts if who == tags.get("user_tag", "human"))
    answers = [text for who, text in texts if who == tags.get("assistant_tag", "gpt")]
    if not answers or not prompt:
        raise ValueError(
            "needs a message of the user and one of the assistant; see tags in dataset_info.json"
        )
    paths = tuple(media / file if (media / file).is_file() else Path(file) for file in files)
    return Example(place, prompt, answers[-1], paths)


def check_data(config: dict[str, Any]) -> None:
    """Raise PacoRewardError if a training configuration names unusable data or a missing image; warn of other labels."""
    for key in ("dataset", "eval_dataset"):
        names = config.get(key) or []
        for name in names.split(",") if isinstance(names, str) else names:
            examples = (
                load_examples(
                    config.get("dataset_dir", "data"), name.strip(), config.get("media_dir")
                )
                or []
            )
            if missing := [
                (file, e.place) for e in examples for file in e.images if not file.is_file()
            ]:
                raise PacoRewardError(
                    f"{len(missing)} images do not exist, first: {missing[0][0]} ({missing[0][1]})"
                )
            if odd := [f"{e.place}, {e.answer[:40]!r}" for e in examples if not e.labeled]:
                print(
                    f"WARNING: {len(odd)} answers begin with neither Yes nor No, which the judge is asked for: {odd[0]} …"
                )


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
    dataset_dir: str | Path, dataset: str, form: RequestForm = DEFAULT_FORM
) -> tuple[FilePairs, list[bool]]:
    """Pairs of a local data set, and whether their answer begins with Yes. Raises PacoRewardError."""
    prefix, rows, labels = pair_prefix(form), [], []
    examples = load_examples(dataset_dir, dataset)
    if examples is None:
        raise PacoRewardError(
            f"dataset {dataset} is not a local ShareGPT file; download it and set file_name"
        )
    for example in examples:
        if len(example.images) != 2 or not example.prompt.startswith(prefix) or not example.labeled:
            raise PacoRewardError(
                f"dataset {example.place}: a pair's message is {prefix}QUESTION with two images (see --image_labels), and "
                "its answer begins with Yes or No"
            )
        rows.append((*example.images, example.prompt.removeprefix(prefix)))
        labels.append(example.answer.startswith("Yes"))
    return FilePairs(rows), labels
