"""ConsistencyRank-Bench (arXiv 2512.04784): its items, the pairs to score, metrics, and a run over all items."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile

import paco_eval  # noqa: F401 - first: it names the packages that are missing

# isort: split
import numpy as np
from scipy.stats import kendalltau, spearmanr

from paco_eval.engines import ScorePairs, add_engine_arguments, make_engine, model_names, weights_of
from paco_eval.results import BenchError, ItemError, read_jsonl
from paco_eval.runner import Benchmark, Prepared, open_image, run_benchmark
from paco_judge.client import Pair
from paco_judge.grid import split_prompt
from paco_judge.questions import Question, form_of, load_question, record
from paco_judge.verdict import mean_over_dimensions

BENCH = "ConsistencyRank-Bench"
RANKS = "consistency_full_rank.jsonl"
PROMPTS = "prompt_data.jsonl"
TEMPLATES = {1: "criteria", 2: "pair_yes_no", 3: "pair"}  # --prompt_template -> question
DEFAULT_TEMPLATE = 3
DOWNLOAD = f"`hf download X-GenGroup/{BENCH} --repo-type dataset --local-dir {BENCH}`"
METRICS = {  # name in results files -> heading in tables
    "accuracy": "accuracy",
    "kendalltau": "tau-b",
    "spearmanr": "rho",
    "footrule": "footrule",
    "top1": "top-1",
    "bottom1": "bottom-1",
    "top_bottom_mean": "top/bottom",
    "kendalltau_published": "tau (published)",
    "spearmanr_published": "rho (published)",
}


@dataclass(frozen=True)
class RankItem:
    """One reference and its candidates; ``true_order`` holds candidate indices, best first."""

    index: int
    folder: str
    ref_image: str
    comp_images: tuple[str, ...]
    true_order: tuple[int, ...]

    @property
    def key(self) -> tuple[int, str, str]:
        """Identifies the item in a results file."""
        return self.index, self.folder, self.ref_image

    @property
    def name(self) -> str:
        """In messages."""
        return f"item {self.folder}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about the benchmark, the question and the engine."""
    parser.add_argument("--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../..")
    question = parser.add_mutually_exclusive_group()
    text = "shipped template, or text file with {theme}, {criterion} or neither"
    question.add_argument("--question", metavar="NAME|FILE", help=text)
    text = f"1 each criterion, 2 Yes or No only, 3 Yes or No, then reasons; default: {DEFAULT_TEMPLATE}"
    question.add_argument("--prompt_template", type=int, choices=tuple(TEMPLATES), help=text)
    add_engine_arguments(parser)


def run(
    args: argparse.Namespace,
    exact: str,
    short: str,
    engine: Callable[[], tuple[str, ScorePairs]],
    weights: Callable[[], str | None],
    question: Question | None = None,
) -> int:
    """``run_benchmark`` with the results file ``<results_dir>/<short>.jsonl`` and the scorer's name ``exact`` in it.

    ``question``: None for scorers that are not asked anything.
    """
    root = find_bench(args.dataset_dir)
    unpack_images(root)
    bench = load_bench(root, question or load_question("pair"))
    bench.asked = record((question,), form_of(args)) if question else None
    return run_benchmark(bench, Path(args.results_dir) / f"{short}.jsonl", exact, engine, args.batch_size, weights)


def run_judge(args: argparse.Namespace) -> int:
    """``run`` with the judge ``args.model``."""
    template = args.prompt_template or DEFAULT_TEMPLATE
    try:
        question = load_question(args.question or TEMPLATES[template], ("theme", "criterion"))
    except ValueError as error:
        raise BenchError(f"--question: {error}") from error
    exact, short = model_names(args.model, args.adapter)
    version = question.name if args.question else template
    return run(args, exact, f"{short}-v{version}", lambda: make_engine(args), weights_of(args), question)


def find_bench(dataset_dir: str | None) -> Path:
    """The benchmark folder: ``dataset_dir`` or the one in it; default: the first in ., .. or ../... Raises BenchError."""
    places = [Path(dataset_dir)] if dataset_dir else [Path("."), Path(".."), Path("../..")]
    for place in places:
        for folder in (place / BENCH, place):
            if (folder / RANKS).is_file():
                return folder
    searched = ", ".join(str(place.resolve()) for place in places)
    raise BenchError(f"no {BENCH} with {RANKS} in {searched}; download it with {DOWNLOAD}, or pass --dataset_dir")


def unpack_images(root: Path) -> None:
    """Unpack ``images.zip`` to ``images/``, once; nothing is written outside (``zipfile`` drops .. and absolute paths).

    Raises:
        BenchError: Neither is there, or the archive cannot be unpacked.
    """
    archive, images = root / "images.zip", root / "images"
    if images.is_dir():
        return
    if not archive.is_file():
        raise BenchError(f"{root} holds neither images/ nor images.zip; download them with {DOWNLOAD}")
    try:
        with TemporaryDirectory(prefix="images-", dir=root) as folder, ZipFile(archive) as packed:
            unpacked = Path(folder) / "images"
            packed.extractall(unpacked)
            inner = unpacked / "images"  # the archive may hold the folder or what is in it
            (inner if inner.is_dir() else unpacked).rename(images)
    except (OSError, BadZipFile, NotImplementedError, RuntimeError) as error:
        if not images.is_dir():  # else another run was faster
            raise BenchError(f"{archive} cannot be unpacked ({error}); unpack it yourself to {images}") from error


def load_bench(root: Path, question: Question) -> Benchmark:
    """Read the rankings, and the prompts if ``question`` is about them. Broken rows are listed, not raised.

    Raises:
        BenchError: A file is missing or not JSON lines.
    """
    prompts = {str(row.get("idx")): row for row in read_jsonl(root / PROMPTS)} if question.fields else {}
    bench = Benchmark(
        prepare=partial(prepare, root, prompts, question),
        row_key=lambda row: (row["index"], row["folder"], row["ref_image"]),
    )
    for index, row in enumerate(read_jsonl(root / RANKS)):
        try:
            bench.items.append(_item(index, row))
        except (KeyError, TypeError, ValueError) as error:
            bench.broken.append((f"item {row.get('folder', f'line {index + 1}')}", f"broken row: {error}"))
    return bench


def _item(index: int, row: dict[str, Any]) -> RankItem:
    listed, ranked = list(row["comp_images"]), list(row["rank_images"])
    if sorted(listed) != sorted(ranked) or len(set(listed)) != len(listed):
        raise ValueError(f"rank_images {ranked} are not a permutation of comp_images {listed}")
    if not all(isinstance(name, str) and name and "\0" not in name for name in (row["ref_image"], *listed)):
        raise ValueError("ref_image and comp_images must be names of images")
    if len(listed) < 2:
        raise ValueError(f"a ranking needs at least two candidates, not {len(listed)}")
    order = tuple(listed.index(name) for name in ranked)
    return RankItem(index, str(row["folder"]), str(row["ref_image"]), tuple(listed), order)


def prepare(root: Path, prompts: dict[str, dict], question: Question, item: RankItem) -> Prepared:
    """An item's pairs, candidate after candidate, and the function that makes its row from their scores.

    Args:
        root: The benchmark folder.
        prompts: Rows with ``prompt`` and ``criteria`` by ``idx``; folder ``0012`` may be idx 12.
        question: Asked about the reference and each candidate.
        item: What to rank.

    Raises:
        ItemError: An unreadable image, or a prompt or criterion that ``question`` needs is missing.
    """
    row = prompts.get(item.folder) or prompts.get(item.folder.lstrip("0") or "0", {})
    if question.fields and not row:
        raise ItemError(f"{PROMPTS} has no row with idx {item.folder}")
    try:
        theme = split_prompt(row["prompt"]).theme if "theme" in question.fields else ""
        asked = question.texts(row.get("criteria") or {}, theme=theme)
    except (KeyError, ValueError, TypeError, AttributeError) as error:  # the last two: a value of another type
        raise ItemError(f"{PROMPTS}: {error}") from error
    texts = [text for dimension in asked.values() for text in dimension]
    folder = root / "images" / item.folder
    names = (item.ref_image, *item.comp_images)
    reference, *candidates = (open_image(n, root if (root / n).is_file() else folder, "") for n in names)
    pairs = [Pair(reference, candidate, text) for candidate in candidates for text in texts]

    def to_row(values: list[float]) -> dict[str, Any]:
        answers = iter(values)
        scores = [
            mean_over_dimensions({dimension: [next(answers) for _ in named] for dimension, named in asked.items()})
            for _ in candidates
        ]
        return {
            "index": item.index,
            "folder": item.folder,
            "ref_image": item.ref_image,
            "comp_images": list(item.comp_images),
            "rank_images": [item.comp_images[i] for i in item.true_order],
            "scores": scores,
            "predicted_images": [item.comp_images[i] for i in predicted_order(scores)],
            "metrics": rank_metrics(scores, item.true_order),
        }

    return pairs, to_row


def predicted_order(scores: Sequence[float]) -> list[int]:
    """Candidate indices, highest score first; ties in listed order."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def rank_metrics(scores: Sequence[float], true_order: Sequence[int]) -> dict[str, float]:
    """All metrics of one item.

    Args:
        scores: (n,) P(Yes) of each candidate against the reference, n >= 2, as listed in the item.
        true_order: (n,) the candidates' indices, best first (a permutation of 0 .. n-1).

    Returns:
        accuracy: share of positions that hold the right candidate. kendalltau (tau-b), spearmanr: between scores and
        true ranks, in [-1, 1]; 0 if all scores are equal. footrule: sum over candidates of |predicted - true
        position|. top1, bottom1: whether the best and the worst are found (0/1), and top_bottom_mean.
        kendalltau_published, spearmanr_published: between the lists of candidate indices in predicted and in true
        order, as the paper's script computes them. ties: pairs of candidates with equal scores.

    Raises:
        ValueError: Fewer than two candidates, or ``true_order`` is not a permutation.
    """
    n = len(scores)
    if n < 2:
        raise ValueError(f"a ranking needs at least two candidates, not {n}")
    if sorted(true_order) != list(range(n)):
        raise ValueError(f"the true order {list(true_order)} is not a permutation of {n} candidates")
    order = predicted_order(scores)
    true_rank, predicted_rank = np.argsort(true_order), np.argsort(order)
    top1, bottom1 = float(order[0] == true_order[0]), float(order[-1] == true_order[-1])
    return {
        "accuracy": float(np.mean(np.array(order) == np.array(true_order))),
        "kendalltau": _correlation(kendalltau, scores, -true_rank),
        "spearmanr": _correlation(spearmanr, scores, -true_rank),
        "footrule": float(np.abs(predicted_rank - true_rank).sum()),
        "top1": top1,
        "bottom1": bottom1,
        "top_bottom_mean": (top1 + bottom1) / 2,
        "kendalltau_published": _correlation(kendalltau, order, true_order),
        "spearmanr_published": _correlation(spearmanr, order, true_order),
        "ties": float(sum(scores[i] == scores[j] for i, j in combinations(range(n), 2))),
    }


def _correlation(function: Callable, first: Sequence[float], second: Sequence[float]) -> float:
    if np.ptp(first) == 0:  # undefined; scipy would warn and return NaN
        return 0.0
    return float(function(first, second).statistic)
