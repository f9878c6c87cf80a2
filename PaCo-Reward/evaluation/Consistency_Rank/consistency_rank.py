"""ConsistencyRank-Bench (arXiv 2512.04784): its items, the pairs to score, and metrics."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

import paco_eval  # noqa: F401 - first: it names the packages that are missing

# isort: split
import numpy as np
from scipy.stats import kendalltau, spearmanr

from paco_eval.data import open_image
from paco_eval.results import BenchError, Row, read_rows
from paco_eval.runner import Item, Prepared
from paco_judge.client import Pair
from paco_judge.grid import split_prompt
from paco_judge.questions import Question
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
    "kendalltau_published": "tau (published)",
    "spearmanr_published": "rho (published)",
}


def find_bench(dataset_dir: str | None) -> Path:
    """The benchmark folder: ``dataset_dir`` or the one in it; default: the first in ., .. or ../... Raises BenchError."""
    places = [Path(dataset_dir)] if dataset_dir else [Path("."), Path(".."), Path("../..")]
    for folder in (folder for place in places for folder in (place / BENCH, place)):
        if (folder / RANKS).is_file():
            return folder
    raise BenchError(f"no {BENCH} in {', '.join(map(str, places))}; download it with {DOWNLOAD}, or pass --dataset_dir")


def unpack_images(root: Path) -> None:
    """Unpack ``images.zip`` to ``images/``, once; nothing is written outside (``zipfile`` drops .. and absolute paths)."""
    archive, images = root / "images.zip", root / "images"
    if images.is_dir():
        return
    try:
        with TemporaryDirectory(prefix="images-", dir=root) as folder, ZipFile(archive) as packed:
            unpacked = Path(folder) / "images"
            packed.extractall(unpacked)
            inner = unpacked / "images"  # the archive may hold the folder or what is in it
            (inner if inner.is_dir() else unpacked).rename(images)
    except (OSError, BadZipFile) as error:
        raise BenchError(f"{archive} cannot be unpacked ({error}); download it with {DOWNLOAD}") from error


def load_bench(dataset_dir: str | None, question: Question) -> list[Item]:
    """The rankings of the benchmark in a folder (see ``find_bench``), asked with ``question``. Raises BenchError."""
    root = find_bench(dataset_dir)
    unpack_images(root)
    prompts = {str(row.get("idx")): row for row in read_rows(root / PROMPTS)} if question.fields else {}
    items = []
    for index, row in enumerate(read_rows(root / RANKS)):
        fields = {"index": index, "folder": str(row.get("folder")), "ref_image": str(row.get("ref_image"))}
        items.append(Item(fields, partial(prepare, root, prompts, question, row)))
    return items


def prepare(root: Path, prompts: dict[str, Row], question: Question, row: Row) -> Prepared:
    """An item's pairs, candidate after candidate, and the function that makes its row from their scores.

    ``prompts``: by ``idx``; folder ``0012`` may be idx 12. ``row``: ``folder``, ``ref_image``, ``comp_images``, and
    ``rank_images``, the same, best first.
    """
    listed, ranked, name = list(row["comp_images"]), list(row["rank_images"]), row["folder"]
    if sorted(listed) != sorted(ranked) or len(set(listed)) != len(listed) or len(listed) < 2:
        raise ValueError(f"rank_images {ranked} are not a permutation of two or more comp_images {listed}")
    order = [listed.index(image) for image in ranked]
    prompt = prompts.get(name) or prompts.get(name.lstrip("0") or "0", {})
    if question.fields and not prompt:
        raise ValueError(f"{PROMPTS} has no row with idx {name}")
    theme = split_prompt(prompt["prompt"]).theme if "theme" in question.fields else ""
    asked = question.texts(prompt.get("criteria") or {}, theme=theme)
    texts = [text for dimension in asked.values() for text in dimension]
    folder = root / "images" / name
    names = (row["ref_image"], *listed)
    reference, *candidates = (open_image(n, root if (root / n).is_file() else folder, "") for n in names)
    pairs = [Pair(reference, candidate, text) for candidate in candidates for text in texts]

    def to_row(values: list[float]) -> Row:
        answers = iter(values)
        scores = [
            mean_over_dimensions({dimension: [next(answers) for _ in named] for dimension, named in asked.items()})
            for _ in candidates
        ]
        predicted = [listed[i] for i in predicted_order(scores)]
        found = {"comp_images": listed, "rank_images": ranked, "scores": scores, "predicted_images": predicted}
        return found | {"metrics": rank_metrics(scores, order)}

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
    """
    n = len(scores)
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
