"""ConsistencyRank-Bench (arXiv 2512.04784): rank candidates by the judge's P(Yes) against the reference.

eval_vllm.py is the same command.

  python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
  python eval_vllm.py --model X --server http://127.0.0.1:8000      a running server (bash vllm_server/launch.sh)
  python eval_vllm.py --model X --engine transformers               without vLLM
  python eval_vllm.py --model X --question mine.txt                 your own wording

vLLM runs in this process: use the interpreter that has vLLM (in this repository .venv-vllm/bin/python). For comparison,
image similarities in [0, 1] and VLMs that were not trained as a judge:

  python eval.py --scorer clip_i                       cosine of OpenCLIP image features, as (1 + cosine) / 2
  python eval.py --scorer dreamsim                     DreamSim (pip install dreamsim), the same
  python eval.py --scorer histogram                    overlap of the color histograms
  python eval.py --scorer Qwen/Qwen2.5-VL-7B-Instruct  any VLM, folder or hub name, asked as the judge
  python eval.py --model PaCo-Reward-7B --port 8000    the model served at this port

Weights come from the hub (DreamSim: from its authors' release page), or with --weights from a folder as `hf download
laion/CLIP-ViT-H-14-laion2B-s32B-b79K` stores it, a .safetensors file with its --clip_model, or DreamSim's unpacked release.

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

from paco_eval.baselines import BASELINES, CLIP_MODEL, DREAMSIM_TYPE, baseline_names, make_baseline
from paco_eval.data import open_image
from paco_eval.results import BenchError, Row, fingerprint, read_rows
from paco_eval.runner import HUB_MODEL, Item, Prepared, exit_status, new_parser, parse, run_benchmark, run_judge
from paco_judge.client import DEFAULT_MODEL, Pair
from paco_judge.grid import split_prompt
from paco_judge.questions import Question, load_question
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
OPTIONS_OF = {"weights": ("clip_i", "dreamsim"), "clip_model": ("clip_i",), "dreamsim_type": ("dreamsim",)}

JUDGE_OPTIONS = (
    "server", "engine", "adapter", "question", "prompt_template", "image_labels", "image_format", "answer_tokens",
)  # fmt: skip


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


def evaluate(args: argparse.Namespace) -> int:
    """Rank with the scorer; returns the number of items without a result. Raises ValueError, OSError."""
    for option, scorers in OPTIONS_OF.items():
        if getattr(args, option) and args.scorer not in scorers:
            raise BenchError(f"--scorer {args.scorer} does not use --{option}")
    if args.scorer in BASELINES:
        given = [f"--{name}" for name in JUDGE_OPTIONS if getattr(args, name) is not None]
        if given or args.model not in (DEFAULT_MODEL, HUB_MODEL):
            raise BenchError(f"--scorer {args.scorer} does not use {given[0] if given else '--model'}")
    version = args.prompt_template or DEFAULT_TEMPLATE
    question = load_question(args.question or TEMPLATES[version], ("theme", "criterion"))
    if args.scorer not in BASELINES:
        version = f"-v{question.name if args.question else version}"
        return run_judge(args, load_bench(args.dataset_dir, question), (question,), version)
    items = load_bench(args.dataset_dir, load_question("pair"))  # a baseline ignores the question
    options = (args.scorer, args.weights, args.clip_model or args.dreamsim_type)
    exact, short = baseline_names(*options)
    places = [args.weights, *sorted(Path(args.weights).glob("*/"))] if args.weights else []  # DreamSim has subfolders
    stamp, file = {"model": exact, "weights": fingerprint(*places)}, Path(args.results_dir) / f"{short}.jsonl"
    return run_benchmark(
        items, file, stamp, lambda: (args.scorer, make_baseline(*options, args.batch_size)), args.batch_size
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--scorer", help=f"{', '.join(BASELINES)}, or a VLM's folder or hub name; default: --model")
    parser.add_argument("--weights", help="local weights of clip_i (folder or .safetensors) or dreamsim (folder)")
    parser.add_argument("--clip_model", help=f"OpenCLIP architecture, or hf-hub:NAME; default: {CLIP_MODEL}")
    parser.add_argument("--dreamsim_type", help=f"type of DreamSim; default: {DREAMSIM_TYPE}")
    parser.add_argument("--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../..")
    question = parser.add_mutually_exclusive_group()
    text = "shipped template, or text file with {theme}, {criterion} or neither"
    question.add_argument("--question", metavar="NAME|FILE", help=text)
    text = f"1 each criterion, 2 Yes or No only, 3 Yes or No, then reasons; default: {DEFAULT_TEMPLATE}"
    question.add_argument("--prompt_template", type=int, choices=tuple(TEMPLATES), help=text)
    args = parse(parser, arguments)
    if args.scorer not in (None, *BASELINES):
        args.model = args.scorer
    return exit_status(evaluate, args)


if __name__ == "__main__":
    sys.exit(main())
