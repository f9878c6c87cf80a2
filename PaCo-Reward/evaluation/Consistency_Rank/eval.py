"""ConsistencyRank-Bench (arXiv 2512.04784): rank candidates by the judge's P(Yes) against the reference.

eval_vllm.py is the same command.

  python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
  python eval_vllm.py --model X --server http://127.0.0.1:8000      a running server (bash vllm_server/launch.sh)
  python eval_vllm.py --model X --engine transformers               without vLLM; X may be any VLM
  python eval_vllm.py --model X --question mine.txt                 your own wording

vLLM runs in this process: use the interpreter that has vLLM (in this repository .venv-vllm/bin/python). Image
similarities in [0, 1], for comparison:

  python eval.py --scorer clip_i       (1 + cosine) / 2 of OpenCLIP image features (pip install open_clip_torch)
  python eval.py --scorer dreamsim     the same of DreamSim's (pip install dreamsim)
  python eval.py --scorer histogram    overlap of the color histograms

Results: <results_dir>/<model>-v<template or question>.jsonl or <scorer>.jsonl; print_eval_table.py prints their table.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

import paco_eval  # noqa: F401 - first: it names the packages that are missing

# isort: split
import numpy as np
from scipy.stats import kendalltau, spearmanr

from paco_eval.baselines import BASELINES, make_baseline
from paco_eval.results import BenchError, Row, read_rows
from paco_eval.runner import (
    HUB_MODEL,
    Item,
    Prepared,
    exit_status,
    new_parser,
    parse,
    run_benchmark,
    run_judge,
)
from paco_judge.client import Pair
from paco_judge.grid import split_prompt
from paco_judge.images import load_image
from paco_judge.questions import DEFAULT_FORM, Question, load_question
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
TEMPLATES = {1: "criteria", 2: "pair_yes_no", 3: "pair"}  # --prompt_template -> question
DEFAULT_TEMPLATE = 3


def find_bench(dataset_dir: str | None) -> Path:
    """The benchmark's folder: ``dataset_dir`` or the one in it; default: the first in ., .. or ../..."""
    places = [dataset_dir] if dataset_dir else [".", "..", "../.."]
    for folder in (folder for place in places for folder in (Path(place) / BENCH, Path(place))):
        if (folder / RANKS).is_file():
            return folder
    raise BenchError(
        f"no {BENCH} in {', '.join(places)}; download it with {DOWNLOAD}, or pass --dataset_dir"
    )


def unpack_images(root: Path) -> None:
    """Unpack ``images.zip`` to ``images/``, once. ``zipfile`` drops .. and absolute paths."""
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
        raise BenchError(
            f"{archive} cannot be unpacked ({error}); download it with {DOWNLOAD}"
        ) from error


def load_bench(dataset_dir: str | None, question: Question) -> list[Item]:
    """The rankings of the benchmark in a folder (see ``find_bench``), asked with ``question``."""
    root = find_bench(dataset_dir)
    unpack_images(root)
    prompts = (
        {str(row.get("idx")): row for row in read_rows(root / PROMPTS)} if question.fields else {}
    )
    items = []
    for index, row in enumerate(read_rows(root / RANKS)):
        fields = {
            "index": index,
            "folder": str(row.get("folder")),
            "ref_image": str(row.get("ref_image")),
        }
        items.append(Item(fields, partial(prepare, root, prompts, question, row)))
    return items


def prepare(root: Path, prompts: dict[str, Row], question: Question, row: Row) -> Prepared:
    """An item's pairs, candidate after candidate, and the function that makes its row from their scores.

    ``prompts``: by ``idx``; folder ``0012`` may be idx 12. ``row``: ``folder``, ``ref_image``, ``comp_images``, and
    ``rank_images``, the same, best first.
    """
    listed, ranked, name = list(row["comp_images"]), list(row["rank_images"]), row["folder"]
    if sorted(listed) != sorted(ranked) or len(set(listed)) != len(listed) or len(listed) < 2:
        raise ValueError(
            f"rank_images {ranked} are not a permutation of two or more comp_images {listed}"
        )
    order = [listed.index(image) for image in ranked]
    prompt = prompts.get(name) or prompts.get(name.lstrip("0") or "0", {})
    if question.fields and not prompt:
        raise ValueError(f"{PROMPTS} has no row with idx {name}")
    theme = split_prompt(prompt["prompt"]).theme if "theme" in question.fields else ""
    asked = question.texts(prompt.get("criteria") or {}, theme=theme)
    texts = [text for dimension in asked.values() for text in dimension]
    folder = root / "images" / name
    names = (row["ref_image"], *listed)
    reference, *candidates = (
        load_image((root if (root / n).is_file() else folder) / n) for n in names
    )
    pairs = [Pair(reference, candidate, text) for candidate in candidates for text in texts]

    def to_row(values: list[float]) -> Row:
        answers = iter(values)
        scores = [
            mean_over_dimensions(
                {dimension: [next(answers) for _ in named] for dimension, named in asked.items()}
            )
            for _ in candidates
        ]
        predicted = [listed[i] for i in predicted_order(scores)]
        found = {
            "comp_images": listed,
            "rank_images": ranked,
            "scores": scores,
            "predicted_images": predicted,
        }
        return found | {"metrics": rank_metrics(scores, order)}

    return pairs, to_row


def predicted_order(scores: Sequence[float]) -> list[int]:
    """Candidate indices, highest score first; ties in listed order."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def published_order(scores: Sequence[float]) -> list[int]:
    """As the paper's script orders candidates: highest score first, of equal scores the later listed one first."""
    return np.argsort(scores, kind="stable")[::-1].tolist()


def rank_metrics(scores: Sequence[float], true_order: Sequence[int]) -> dict[str, float]:
    """All metrics of one item (docs/method.md, section 8, explains them).

    Args:
        scores: (n,) P(Yes) of each candidate against the reference, n >= 2.
        true_order: (n,) the candidates' indices, best first.
    """
    n = len(scores)
    order = predicted_order(scores)
    order_as_published = published_order(scores)
    true_rank = np.argsort(true_order)
    predicted_rank = np.argsort(order)
    top1 = float(order[0] == true_order[0])
    bottom1 = float(order[-1] == true_order[-1])
    return {
        "accuracy": float(np.mean(np.array(order) == np.array(true_order))),
        "kendalltau": _correlation(kendalltau, scores, -true_rank),
        "spearmanr": _correlation(spearmanr, scores, -true_rank),
        "footrule": float(np.abs(predicted_rank - true_rank).sum()),
        "top1": top1,
        "bottom1": bottom1,
        "top_bottom_mean": (top1 + bottom1) / 2,
        # between the lists of indices in predicted and in true order, as the paper's script computes them
        "kendalltau_published": _correlation(kendalltau, order_as_published, true_order),
        "spearmanr_published": _correlation(spearmanr, order_as_published, true_order),
        "ties": float(sum(scores[i] == scores[j] for i, j in combinations(range(n), 2))),
    }


def _correlation(function: Callable, first: Sequence[float], second: Sequence[float]) -> float:
    if np.ptp(first) == 0:  # undefined; scipy would warn and return NaN
        return 0.0
    return float(function(first, second).statistic)


def evaluate(args: argparse.Namespace) -> int:
    """Rank the candidates; returns the number of items without a result."""
    question = load_question(
        args.question or TEMPLATES[args.prompt_template], ("theme", "criterion")
    )
    if args.scorer is None:
        version = f"-v{question.name if args.question else args.prompt_template}"
        return run_judge(args, load_bench(args.dataset_dir, question), (question,), version)
    items = load_bench(args.dataset_dir, load_question("pair"))  # a baseline ignores the question
    file, make = (
        Path(args.results_dir) / f"{args.scorer}.jsonl",
        partial(make_baseline, args.scorer, args.batch_size),
    )
    return run_benchmark(items, file, {"model": BASELINES[args.scorer]}, make, args.batch_size)


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--scorer", choices=BASELINES, help="an image similarity instead of the judge"
    )
    parser.add_argument(
        "--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../.."
    )
    question = parser.add_mutually_exclusive_group()
    text = "shipped template, or text file with {theme}, {criterion} or neither"
    question.add_argument("--question", metavar="NAME|FILE", help=text)
    text = f"1 each criterion, 2 Yes or No only, 3 Yes or No, then reasons; default: {DEFAULT_TEMPLATE}"
    question.add_argument(
        "--prompt_template", type=int, choices=TEMPLATES, default=DEFAULT_TEMPLATE, help=text
    )
    args = parse(parser, arguments)
    if args.scorer:  # a baseline asks no judge
        judge = ("server", "engine", "adapter", "question", "prompt_template", *vars(DEFAULT_FORM))
        given = [name for name in judge if getattr(args, name) != parser.get_default(name)]
        if given or args.model != HUB_MODEL:
            parser.error(f"--scorer {args.scorer} does not use --{(*given, 'model')[0]}")
    return exit_status(evaluate, args)


if __name__ == "__main__":
    sys.exit(main())
