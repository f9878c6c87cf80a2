"""EditReward-Bench: does the judge give the better of two edits the higher score?

  bash evaluate_vllm_PaCoReward.sh                                  PaCo-Reward-7B, vLLM here
  bash evaluate_vllm_PaCoReward.sh --model ../../saves/judge        your own judge
  bash evaluate_vllm_PaCoReward.sh --server http://127.0.0.1:8000   a running server
  bash evaluate_vllm_PaCoReward.sh --engine transformers            without vLLM

For each row the judge sees the input image with each of the two edits. Dimension prompt_following
asks whether the edit follows the instruction, consistency whether everything else stayed the same,
overall asks both and takes sqrt(prompt_following * consistency). Scores are P(Yes).

The data set is the hub's EditScore/EditReward-Bench, or with --dataset a folder of parquet files
(as `hf download` stores it) or of save_to_disk, or a .jsonl file whose image paths are relative to
it. Columns: key [2], instruction, input_image, output_images [2, the better first], task_type,
dimension.

Results: <results_dir>/<model>.jsonl (with --question: <model>-v<names>.jsonl). At the end the
tables of all models in the folder are printed (again with calculate_statistics.py).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from paco_eval.baselines import EditScoreService, GradedEdit
from paco_eval.benchmark import (
    Item,
    Row,
    as_latex,
    as_text,
    exit_status,
    new_parser,
    parse,
    read_results,
    rows_of,
    run_judge,
    score_benchmark,
)
from paco_judge.errors import UserError, run_command
from paco_judge.files import read_json_lines
from paco_judge.images import UnreadableImage, read_image
from paco_judge.questions import (
    EDIT_DIMENSIONS,
    EDITING,
    Pair,
    Question,
    editing_texts,
    load_editing_questions,
)
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
TABLES_HELP = """\
Tables over the results of EditReward-Bench: pairwise accuracy by group and by task type, for
each model and dimension.

python calculate_statistics.py --results_dir results --output results_summary [--backbone MODEL]

A pair is right when the better edit's score is higher (strict) or not lower (lenient). Groups and
`average` count every task type alike, as the authors' script does, `pair mean` every pair. `ties`
are pairs with equal scores; `-`: no such pairs.

What the authors' script wrote, in folders TASK/DIMENSION.jsonl, is read beside our files.
"""
COLUMNS = ("key", "instruction", "task_type", "dimension")
GROUPS = {
    "object": ("subject-add", "subject-remove", "subject-replace"),
    "appearance": ("color_alter", "material_alter", "style_change", "tone_transfer"),
    "scene": ("background_change", "extract"),
    "advanced": ("ps_human", "text_change", "motion_change", "compose"),
}
GROUP_OF = {}
for _group, _tasks in GROUPS.items():
    GROUP_OF |= dict.fromkeys(_tasks, _group)
KINDS = ("strict", "lenient")


class EditRows:
    """The rows of a data set, and their images: one before the edit, and two edits of it.

    Images stay undecoded until they are asked for, so that a broken one affects only its row.

    Args:
        dataset: Hub name, folder of ``save_to_disk`` or of parquet files, or a .jsonl file, to
            which image paths are relative. Default: the folder named as the data set in ., .. or
            ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``.
        texts: Columns that are needed.
        before: Column of the image before the edit.
        after: Column of the two edits.

    Raises:
        UserError: The data set is missing, not readable, or lacks a column.
    """

    def __init__(
        self, dataset: str | None, hub_name: str, texts: Sequence[str], before: str, after: str
    ) -> None:
        self.rows: list[Row]
        self._before = before
        self._after = after
        self._stored: Callable[[int], Row]
        path = Path(dataset or _local_copy(hub_name) or hub_name).expanduser()
        self._root = path.parent if path.is_file() else path
        if path.suffix.lower() == ".jsonl":
            self.rows = read_json_lines(path)
            self._stored = self.rows.__getitem__
            columns = set().union(*self.rows)
        else:
            loaded = _load(path, hub_name)
            columns = set(loaded.column_names)
            undecoded = loaded.with_format("arrow")
            available = [name for name in texts if name in columns]
            self.rows = undecoded.select_columns(available)[:].to_pylist()
            self._stored = lambda index: undecoded[index].to_pylist()[0]
        missing = [column for column in (*texts, before, after) if column not in columns]
        if missing:
            raise UserError(
                f"dataset {path} lacks the columns {', '.join(missing)}; "
                f"it has {', '.join(sorted(columns))}"
            )

    def images(self, index: int) -> list[Image.Image]:
        """The image before the edit and the two edits, RGB.

        Raises:
            ValueError: One cannot be read; the message names its column.
            KeyError: The row lacks a column.
        """
        row = self._stored(index)
        before = row[self._before]
        edits = row[self._after]
        if not isinstance(edits, list) or len(edits) != 2:
            raise ValueError(f"{self._after} must hold 2 images")
        images = [self._open(before, self._before)]
        for number, edit in enumerate(edits):
            images.append(self._open(edit, f"{self._after}[{number}]"))
        return images

    def _open(self, stored: Any, column: str) -> Image.Image:
        """The image of a cell: a path relative to the data set, bytes, or a dict with either."""
        if isinstance(stored, dict):
            stored = stored.get("bytes") or stored.get("path")
        if not isinstance(stored, (bytes, str)) or not stored:
            raise ValueError(f"{column} holds no image but {stored!r}")
        is_path = isinstance(stored, str)
        try:
            return read_image(self._root / stored if is_path else stored)
        except UnreadableImage as error:
            place = f"{column} {stored if is_path else ''}"
            raise ValueError(f"image {place} {error}") from error


def _local_copy(hub_name: str) -> Path | None:
    """The folder named as the data set in ., .. or ../... None: there is none.

    The folder of a benchmark's code may have that name; it counts if the data were downloaded to
    it.
    """
    for place in (".", "..", "../.."):
        folder = Path(place) / hub_name.partition("/")[2]
        is_code = (folder / "evaluation.py").is_file() and not (folder / "data").is_dir()
        if folder.is_dir() and not is_code:
            return folder
    return None


def _load(path: Path, hub_name: str) -> Any:
    """A data set of the package ``datasets``: the split train, or without one all splits."""
    import datasets

    try:
        is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        load = datasets.load_from_disk if is_saved else datasets.load_dataset
        loaded = load(str(path))
    except Exception as error:  # hub, network, cache and format errors share no base class
        local_name = hub_name.partition("/")[2]
        raise UserError(
            f"dataset {path} cannot be read: {str(error).partition(chr(10))[0]}; download it with "
            f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}` "
            "(HF_ENDPOINT: a mirror)"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    return datasets.concatenate_datasets(list(loaded.values()))


@dataclass(frozen=True)
class EditReward:
    """Rows with two edits of an image, the better one first."""

    source: EditRows
    questions: Sequence[Question]
    resize_edits: bool  # to the size of their input image, with Pillow's default resampling

    def items(self) -> list[Item]:
        """One for each row."""
        items = []
        for index, row in enumerate(self.source.rows):
            fields = {"index": index, "key": row.get("key"), "dimension": row.get("dimension")}
            items.append(Item(fields, row))
        return items

    def pairs(self, item: Item) -> list[Pair]:
        """All questions about the better edit, then about the worse one."""
        self._task(item)
        texts = self._texts(item)
        before, *edits = self.images(item)
        pairs = []
        for edit in edits:
            pairs += [Pair(before, edit, text) for text in texts.values()]
        return pairs

    def images(self, item: Item) -> list[Image.Image]:
        """The image before the edits, and the edits as they are shown."""
        before, *edits = self.source.images(item.fields["index"])
        if self.resize_edits:
            edits = [edit.resize(before.size) for edit in edits]
        return [before, *edits]

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """The answers about both edits, by what each is about, and the edits' scores."""
        about = list(self._texts(item))
        answers = []
        edit_scores = []
        for start in (0, len(about)):
            of_edit = dict(zip(about, scores[start : start + len(about)], strict=True))
            answers.append(of_edit)
            edit_scores.append(editing_score(*(Verdict(p_yes) for p_yes in of_edit.values())))
        return {"task_type": self._task(item), "answers": answers, "scores": edit_scores}

    def _task(self, item: Item) -> str:
        return str(item.row["task_type"])

    def _texts(self, item: Item) -> dict[str, str]:
        return editing_texts(self.questions, item.row["instruction"], item.row["dimension"])


class GradedByEditScore(EditReward):
    """The same rows, whose edits EditScore grades in the row's dimension."""

    def pairs(self, item: Item) -> list[Pair]:
        """The better edit and the worse one."""
        self._task(item)
        before, *edits = self.images(item)
        row = item.row
        return [
            GradedEdit(before, edit, row["instruction"], (), row["dimension"]) for edit in edits
        ]

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """The grades of both edits."""
        return {"task_type": self._task(item), "scores": list(scores)}


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--dataset",
        "--dataset_dir",
        "--benchmark_dir",
        help="hub name, folder or file; default: EditReward-Bench in ., .. or ../.., else "
        + HUB_NAME,
    )
    parser.add_argument(
        "--question",
        nargs="+",
        metavar="NAME|FILE",
        help="names of questions (questions.toml) or text files: is the rest kept, is the "
        f"instruction followed; one alone decides every dimension; default: {' '.join(EDITING)}",
    )
    parser.add_argument(
        "--scorer",
        choices=("edit_score",),
        help="EditScore in place of the judge; --server is then the address of `bash "
        "scripts/reward_service.sh edit_score` (PaCo-GRPO). As published: with --resize_edits",
    )
    parser.add_argument(
        "--resize_edits", action="store_true", help="show edits at the size of their input image"
    )
    parser.add_argument(
        "--output", default="results_summary", help="the tables: <output>.txt and <output>.tex"
    )
    return parse(parser, arguments)


def evaluate(args: argparse.Namespace) -> int:
    """Score and print the tables; returns the number of rows without a result."""
    questions = load_editing_questions(args.question or EDITING)
    version = ""
    if args.question:
        version = "-v" + "+".join(question.name for question in questions)
    source = EditRows(args.dataset, HUB_NAME, COLUMNS, "input_image", "output_images")
    if args.scorer:
        num_failed = grade(args, GradedByEditScore(source, (), args.resize_edits))
    else:
        benchmark = EditReward(source, questions, args.resize_edits)
        num_failed = run_judge(args, benchmark, questions, version, resize_edits=args.resize_edits)
    if num_failed < len(source.rows):
        save_tables(Path(args.results_dir), args.output)
    return num_failed


def grade(args: argparse.Namespace, benchmark: GradedByEditScore) -> int:
    """Score with EditScore; returns the number of rows without a result."""
    if not args.server:
        raise UserError(
            "--scorer edit_score needs --server, the address of a reward service; start one in "
            "PaCo-GRPO: bash scripts/reward_service.sh edit_score --kwargs "
            """'{"base_url": "http://127.0.0.1:8000"}'"""
        )
    service = EditScoreService(args.server)
    stamp = {
        "model": args.scorer,
        "asked": {"resize_edits": args.resize_edits},
        "weights": service.identity,
    }
    file = Path(args.results_dir) / f"{args.scorer}.jsonl"
    return score_benchmark(
        benchmark, file, stamp, lambda: service, args.batch_size, args.continue_unknown
    )


def main(arguments: list[str] | None = None) -> int:
    """The command ``evaluation.py`` of Edit-Bench, which evaluate_vllm_PaCoReward.sh runs."""
    return exit_status(evaluate, command_line(arguments))


def parse_row(row: Row) -> Row:
    """The columns that the tables need."""
    better, worse = map(float, row["scores"])
    task = str(row["task_type"])
    return {
        "dimension": row["dimension"],
        "group": GROUP_OF.get(task, "other"),
        "task type": task,
        "strict": better > worse,
        "lenient": better >= worse,
        "ties": better == worse,
    }


def published_rows(results_dir: Path) -> list[Row]:
    """The rows of ``parse_row`` of what the authors' script wrote, TASK/DIMENSION.jsonl.

    ``model`` is the path of the folder that holds the tasks. Raises UserError.
    """
    rows = []
    for file in sorted(results_dir.glob("**/*/*.jsonl")):
        if file.stem in EDIT_DIMENSIONS:
            model = str(file.parent.parent.relative_to(results_dir))
            if model == ".":
                model = results_dir.resolve().name
            about = {"task_type": file.parent.name, "dimension": file.stem}
            rows += rows_of(file, model, partial(_parse_published, about))
    return rows


def _parse_published(about: Row, row: Row) -> Row:
    return parse_row({"scores": row["score"]} | about)


def group_table(results: pd.DataFrame) -> pd.DataFrame:
    """Two rows (strict, lenient) for each model and dimension.

    Its columns are the groups, ``average`` and ``pair mean``.
    """
    keys = ["model", "dimension", "right when"]
    judged = results.melt(
        ["model", "dimension", "group", "task type", "ties"], [*KINDS], "right when", "right"
    )
    judged["right when"] = pd.Categorical(judged["right when"], KINDS)
    pairs = judged.groupby(keys, observed=True)
    tasks = judged.groupby([*keys, "group", "task type"], observed=True)["right"].mean()
    groups = tasks.groupby([*keys, "group"], observed=True).mean()
    table = groups.unstack("group").reindex(columns=[*GROUPS])
    table.insert(0, "pairs", pairs.size())
    table["average"] = tasks.groupby(keys, observed=True).mean()
    table["pair mean"] = pairs["right"].mean()
    table["ties"] = pairs["ties"].sum().astype(int)
    return table.reset_index()


def task_table(results: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, group and task type.

    Its columns are the pairs, strict and lenient accuracy of each dimension.
    """
    shares = results.groupby(["model", "group", "task type", "dimension"]).agg(
        pairs=("strict", "size"), strict=("strict", "mean"), lenient=("lenient", "mean")
    )
    table = shares.unstack("dimension")
    table["pairs"] = table["pairs"].fillna(0).astype(int)
    table = table.swaplevel(axis=1).sort_index(axis=1, level=0, sort_remaining=False)
    table.columns = [f"{dimension}: {column}" for dimension, column in table.columns]
    return table.reset_index()


def save_tables(results_dir: Path, output: str, model: str | None = None) -> None:
    """Print and write the tables; ``model``: only of files whose name begins with it."""
    results = read_results(results_dir, parse_row, published_rows(results_dir))
    if model:
        results = results[results["model"].str.startswith(Path(model).name)]
        if results.empty:
            raise UserError(f"no results of {model} in {results_dir}")
    write_tables(output, group_table(results), task_table(results))


def tables_main(arguments: list[str] | None = None) -> int:
    """The command ``calculate_statistics.py``."""
    parser = new_parser(TABLES_HELP)
    parser.add_argument("--results_dir", "--result_dir", default="results")
    parser.add_argument(
        "--output", default="results_summary", help="written as <output>.txt and <output>.tex"
    )
    parser.add_argument("--backbone", help="only the results of this model")
    args = parser.parse_args(arguments)
    save = partial(save_tables, Path(args.results_dir), args.output, args.backbone)
    return run_command(save, OSError)


def write_tables(output: str, *tables: pd.DataFrame) -> None:
    """Print the tables, and write them to ``<output>.txt`` and ``<output>.tex``."""
    text = "\n".join(map(as_text, tables))
    latex = "\n".join(map(as_latex, tables))
    # Not by with_suffix: a name may be v1.5.
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text(latex, encoding="utf-8")
    print(text, end="")
