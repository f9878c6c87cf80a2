"""ConsistencyRank: rank candidates by the judge's P(Yes) against the reference (eval_vllm.py is the same command).

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from consistency_rank import load_bench

from paco_eval.baselines import BASELINES, CLIP_MODEL, DREAMSIM_TYPE, baseline_names, make_baseline
from paco_eval.results import BenchError, fingerprint
from paco_eval.runner import HUB_MODEL, exit_status, new_parser, parse, run_benchmark, run_judge
from paco_judge.client import DEFAULT_MODEL
from paco_judge.questions import load_question

TEMPLATES = {1: "criteria", 2: "pair_yes_no", 3: "pair"}  # --prompt_template -> question
DEFAULT_TEMPLATE = 3
OPTIONS_OF = {"weights": ("clip_i", "dreamsim"), "clip_model": ("clip_i",), "dreamsim_type": ("dreamsim",)}

JUDGE_OPTIONS = (
    "server", "engine", "adapter", "question", "prompt_template", "image_labels", "image_format", "answer_tokens",
)  # fmt: skip


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
