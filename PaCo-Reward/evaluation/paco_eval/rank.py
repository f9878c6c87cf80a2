"""ConsistencyRank-Bench (arXiv 2512.04784): rank candidates by the judge's P(Yes) against the
reference. eval.py and eval_vllm.py are the same command.

  python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85
  python eval_vllm.py --model X --server http://127.0.0.1:8000    a running server
  python eval_vllm.py --model X --engine transformers             without vLLM; X may be any VLM
  python eval_vllm.py --model X --question mine.txt               your own wording

vLLM runs in this process: use the interpreter that has vLLM (in this repository
.venv-vllm/bin/python). Image similarities in [0, 1], for comparison:

  python eval.py --scorer clip_i       (1 + cosine) / 2 of OpenCLIP image features
                                       (pip install open_clip_torch)
  python eval.py --scorer dreamsim     the same of DreamSim's (pip install dreamsim)
  python eval.py --scorer histogram    overlap of the color histograms

Results: <results_dir>/<model>-v<template or question>.jsonl or <scorer>.jsonl;
print_eval_table.py prints their table.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import numpy as np
import pandas as pd
from PIL import Image
from scipy.stats import kendalltau, spearmanr
from scipy.stats import t as student_t

from paco_eval.baselines import BASELINES, make_baseline
from paco_eval.benchmark import (
    Item,
    Row,
    as_latex,
    as_text,
    exit_status,
    new_parser,
    parse,
    read_results,
    results_file,
    run_judge,
    score_benchmark,
)
from paco_judge.errors import UserError
from paco_judge.files import read_json_lines
from paco_judge.grid import split_prompt
from paco_judge.images import load_image
from paco_judge.questions import Pair, Question, load_question
from paco_judge.verdict import mean_over_dimensions

BENCH = "ConsistencyRank-Bench"
RANKS = "consistency_full_rank.jsonl"
PROMPTS = "prompt_data.jsonl"
DOWNLOAD = f"`hf download X-GenGroup/{BENCH} --repo-type dataset --local-dir {BENCH}`"
METRICS = {  # name in results files -> heading in tables
    "accuracy": "accuracy",
    "kendalltau": "tau-b",
    "spearmanr": "rho",
    "footrule": "footrule",
    "top1": "top-1",
    "bottom1": "bottom-1",
    "top_bottom_mean": "top/bottom",
    "accuracy_published": "accuracy (published)",
    "kendalltau_published": "tau (published)",
    "spearmanr_published": "rho (published)",
    "footrule_published": "footrule (published)",
    "top1_published": "top-1 (published)",
    "bottom1_published": "bottom-1 (published)",
    "top_bottom_mean_published": "top/bottom (published)",
}
PUBLISHED = {  # name in result files of the paper's script -> ours
    "accuracy": "accuracy_published",
    "kendalltau": "kendalltau_published",
    "spearmanr": "spearmanr_published",
    "footrule_distance": "footrule_published",
    "top1_accuracy": "top1_published",
    "bottom1_accuracy": "bottom1_published",
    "top1_bottom1_accuracy": "top_bottom_mean_published",
}
TABLE_HELP = """\
A table of the results of eval_vllm.py and eval.py: means over items, one row per model and
prompt template.

python print_eval_table.py --results_dir results --output_file results_summary.txt \\
    --output_format txt [--print_std]

Result files of the paper's script may lie in the same folder: their numbers are in the columns
(published), and the others follow from their scores. `-`: a file does not have it.
"""
TEMPLATES = {1: "criteria", 2: "pair_yes_no", 3: "pair"}  # --prompt_template -> question
DEFAULT_TEMPLATE = 3


def find_bench(dataset_dir: str | None) -> Path:
    """The benchmark's folder: ``dataset_dir``, or the folder of that name in it.

    Without ``dataset_dir``, this and the two parent folders are searched.
    """
    places = [dataset_dir] if dataset_dir else [".", "..", "../.."]
    for place in map(Path, places):
        for folder in (place / BENCH, place):
            if (folder / RANKS).is_file():
                return folder
    raise UserError(
        f"no {BENCH} in {', '.join(places)}; download it with {DOWNLOAD}, or pass --dataset_dir"
    )


def unpack_images(root: Path) -> None:
    """Unpack ``images.zip`` to ``images/``, once. ``zipfile`` drops .. and absolute paths."""
    archive = root / "images.zip"
    images = root / "images"
    if images.is_dir():
        return
    with TemporaryDirectory(prefix="images-", dir=root) as folder, ZipFile(archive) as packed:
        unpacked = Path(folder) / "images"
        packed.extractall(unpacked)
        inner = unpacked / "images"  # the archive may hold the folder or what is in it
        (inner if inner.is_dir() else unpacked).rename(images)


@dataclass(frozen=True)
class ConsistencyRank:
    """Rankings, each of a reference image's candidates.

    A row has ``folder``, ``ref_image``, ``comp_images``, and ``rank_images``, the same, best first.
    """

    root: Path
    question: Question
    prompts: Mapping[str, Row]  # by idx, without leading zeros; empty if the question has no fields
    rankings: Sequence[Row]

    @classmethod
    def load(cls, dataset_dir: str | None, question: Question) -> "ConsistencyRank":
        """The benchmark in a folder (see ``find_bench``). Raises UserError."""
        root = find_bench(dataset_dir)
        unpack_images(root)
        prompts = {}
        if question.fields:
            for row in read_json_lines(root / PROMPTS):
                prompts[str(row.get("idx")).lstrip("0")] = row
        return cls(root, question, prompts, read_json_lines(root / RANKS))

    def items(self) -> list[Item]:
        """One for each ranking."""
        items = []
        for index, row in enumerate(self.rankings):
            folder = str(row.get("folder"))
            reference = str(row.get("ref_image"))
            prompt = self.prompts.get(folder.lstrip("0"))  # folder 0012 may be idx 12
            row = row | {"prompt": prompt}
            items.append(Item({"index": index, "folder": folder, "ref_image": reference}, row))
        return items

    def pairs(self, item: Item) -> list[Pair]:
        """All texts about the first candidate, then about the second, and so on."""
        listed = list(item.row["comp_images"])
        ranked = list(item.row["rank_images"])
        if sorted(listed) != sorted(ranked):
            raise ValueError(f"rank_images {ranked} are not a permutation of comp_images {listed}")
        texts = []
        for named in self._texts(item).values():
            texts += named
        reference = self._image(item, item.row["ref_image"])
        pairs = []
        for name in listed:
            candidate = self._image(item, name)
            pairs += [Pair(reference, candidate, text) for text in texts]
        return pairs

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """Scores of the candidates, their order, and how it compares with the true one."""
        listed = list(item.row["comp_images"])
        ranked = list(item.row["rank_images"])
        texts = self._texts(item)
        answers = iter(scores)
        candidate_scores = []
        for _ in listed:
            by_dimension = {}
            for dimension, named in texts.items():
                by_dimension[dimension] = list(islice(answers, len(named)))
            candidate_scores.append(mean_over_dimensions(by_dimension))
        true_order = [listed.index(name) for name in ranked]
        return {
            "comp_images": listed,
            "rank_images": ranked,
            "scores": candidate_scores,
            "predicted_images": [listed[index] for index in predicted_order(candidate_scores)],
            "metrics": rank_metrics(candidate_scores, true_order),
        }

    def _texts(self, item: Item) -> dict[str | None, tuple[str, ...]]:
        """What is asked about each candidate, by dimension."""
        fields = self.question.fields
        prompt = item.row["prompt"] or {}
        if fields and not prompt:
            raise ValueError(f"{PROMPTS} has no row with idx {item.row['folder']}")
        theme = split_prompt(prompt["prompt"]).theme if "theme" in fields else ""
        return self.question.texts(prompt.get("criteria") or {}, theme=theme)

    def _image(self, item: Item, name: str) -> Image.Image:
        if (self.root / name).is_file():
            return load_image(self.root / name)
        return load_image(self.root / "images" / item.row["folder"] / name)


def predicted_order(scores: Sequence[float]) -> list[int]:
    """Candidate indices, highest score first; ties in listed order."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def published_order(scores: Sequence[float]) -> list[int]:
    """As the paper's script orders candidates: of equal scores, the later listed one is first."""
    return np.argsort(scores, kind="stable")[::-1].tolist()


def rank_metrics(scores: Sequence[float], true_order: Sequence[int]) -> dict[str, float]:
    """All metrics of one item (docs/method.md, section 8, explains them).

    Args:
        scores: (n,) P(Yes) of each candidate against the reference, n >= 2.
        true_order: (n,) the candidates' indices, best first.
    """
    # The paper's script correlates the lists of indices in predicted and in true order.
    order_as_published = published_order(scores)
    true_rank = np.argsort(true_order)
    metrics = _order_metrics(predicted_order(scores), true_order)
    metrics["kendalltau"] = _correlation(kendalltau, scores, -true_rank)
    metrics["spearmanr"] = _correlation(spearmanr, scores, -true_rank)
    published = _order_metrics(order_as_published, true_order)
    published["kendalltau"] = _correlation(kendalltau, order_as_published, true_order)
    published["spearmanr"] = _correlation(spearmanr, order_as_published, true_order)
    for name, value in published.items():
        metrics[f"{name}_published"] = value
    num_ties = sum(first == second for first, second in combinations(scores, 2))
    return metrics | {"ties": float(num_ties)}


def _order_metrics(order: Sequence[int], true_order: Sequence[int]) -> dict[str, float]:
    """The metrics that need no scores, of two lists of candidates, best first."""
    distances = np.abs(np.argsort(order) - np.argsort(true_order))
    top1 = float(order[0] == true_order[0])
    bottom1 = float(order[-1] == true_order[-1])
    return {
        "accuracy": float(np.mean(np.array(order) == np.array(true_order))),
        "footrule": float(distances.sum()),
        "top1": top1,
        "bottom1": bottom1,
        "top_bottom_mean": (top1 + bottom1) / 2,
    }


def _correlation(function: Callable, first: Sequence[float], second: Sequence[float]) -> float:
    if np.ptp(first) == 0:  # undefined; scipy would warn and return NaN
        return 0.0
    return float(function(first, second).statistic)


def agreement(rows: Sequence[Row]) -> str:
    """How many pairs of candidates are in the order of people, with a 95 % interval; a sentence.

    Sets of one prompt are not independent, so the interval is of prompts: the linearized variance
    of a ratio of sums (Cochran 1977, Sampling Techniques, 6.4) and Student's t. Candidates with
    equal scores count half.
    """
    right: dict[str, float] = {}  # by prompt
    pairs: dict[str, int] = {}
    for row in rows:
        scores = dict(zip(row["comp_images"], row["scores"], strict=True))
        for better, worse in combinations(row["rank_images"], 2):
            is_right = (1 + np.sign(scores[better] - scores[worse])) / 2
            right[row["folder"]] = right.get(row["folder"], 0.0) + is_right
            pairs[row["folder"]] = pairs.get(row["folder"], 0) + 1
    sums = np.array(list(right.values()))
    counts = np.array(list(pairs.values()))
    share = sums.sum() / counts.sum()
    prompts = len(counts)
    of = f"{counts.sum()} pairs of candidates, {len(rows)} sets of {prompts} prompts"
    if prompts == 1:
        return f"agrees with the rankings on {share:.3f} of {of}"
    residuals = sums - share * counts
    variance = prompts / (prompts - 1) * (residuals**2).sum() / counts.sum() ** 2
    margin = float(student_t.ppf(0.975, prompts - 1) * np.sqrt(variance))
    low = max(0.0, share - margin)
    high = min(1.0, share + margin)
    return (
        f"agrees with the rankings on {share:.3f} (95 % interval {low:.3f} to {high:.3f}) of {of}"
    )


def evaluate(args: argparse.Namespace) -> int:
    """Rank the candidates; returns the number of items without a result."""
    name = args.question or TEMPLATES[args.prompt_template]
    question = load_question(name, ("theme", "criterion"))
    if args.scorer is None:
        benchmark = ConsistencyRank.load(args.dataset_dir, question)
        version = f"-v{question.name if args.question else args.prompt_template}"
        num_failed = run_judge(args, benchmark, (question,), version)
        file = results_file(args, version)
        if file.is_file():
            print(agreement(read_json_lines(file)))
        return num_failed
    # A baseline ignores the question.
    benchmark = ConsistencyRank.load(args.dataset_dir, load_question("pair"))
    file = Path(args.results_dir) / f"{args.scorer}.jsonl"
    load_engine = partial(make_baseline, args.scorer, args.batch_size)
    return score_benchmark(
        benchmark, file, {"model": BASELINES[args.scorer]}, load_engine, args.batch_size
    )


def main(arguments: list[str] | None = None) -> int:
    """The command ``eval.py``, or ``eval_vllm.py``."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--scorer",
        choices=BASELINES,
        help="an image similarity in place of the judge and its options",
    )
    parser.add_argument(
        "--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../.."
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--question",
        metavar="NAME|FILE",
        help="a question's name (questions.toml), or text file with {theme}, {criterion} or neither",
    )
    question.add_argument(
        "--prompt_template",
        type=int,
        choices=TEMPLATES,
        default=DEFAULT_TEMPLATE,
        help="1 each criterion, 2 Yes or No only, 3 Yes or No, then reasons; default: %(default)s",
    )
    return exit_status(evaluate, parse(parser, arguments))


def parse_row(row: Row) -> Row:
    """The columns that the table needs, NaN for what the row does not have.

    Raises:
        KeyError, TypeError, ValueError: It is a row neither of ours nor of the paper's script.
    """
    stated = {}
    for name in PUBLISHED.keys() & row.keys():
        stated[PUBLISHED[name]] = row[name]
    if not stated:
        stated = row["metrics"]
    metrics = {}
    if {"scores", "comp_images", "rank_images"} <= row.keys():
        true_order = [row["comp_images"].index(name) for name in row["rank_images"]]
        metrics = rank_metrics(row["scores"], true_order)
    metrics |= stated
    return {name: float(metrics.get(name, np.nan)) for name in (*METRICS, "ties")}


def make_table(results_dir: str, print_std: bool) -> pd.DataFrame:
    """A row of means for each results file; ± standard deviations, without Bessel's correction."""
    by_model = read_results(Path(results_dir), parse_row).groupby("model")
    metrics = by_model[list(METRICS)]
    table = metrics.mean()
    is_whole = metrics.count().eq(by_model.size(), axis="index")
    if print_std:
        deviations = metrics.std(ddof=0)
        table = table.map("{:.4f}".format) + " ± " + deviations.map("{:.4f}".format)
    table = table.where(is_whole).rename(columns=METRICS)
    table.insert(0, "items", by_model.size())
    ties = by_model["ties"]
    num_ties = ties.sum().astype(int).astype(object)  # where() would make floats of integers
    table["ties"] = num_ties.where(ties.count() == by_model.size())
    return table.reset_index()


def print_table(args: argparse.Namespace) -> None:
    """Print and write the table."""
    table = make_table(args.results_dir, args.print_std)
    as_lines = as_latex if args.output_format == "latex" else as_text
    text = as_lines(table)
    Path(args.output_file).write_text(text, encoding="utf-8")
    print(text, end="")


def table_main(arguments: list[str] | None = None) -> int:
    """The command ``print_eval_table.py``."""
    parser = new_parser(TABLE_HELP)
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--output_file", default="results_summary.txt")
    parser.add_argument("--output_format", choices=("txt", "latex"), default="txt")
    parser.add_argument(
        "--print_std", action="store_true", help="mean and standard deviation over items"
    )
    return exit_status(print_table, parser.parse_args(arguments))
