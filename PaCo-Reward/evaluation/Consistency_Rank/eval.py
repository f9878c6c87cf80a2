"""ConsistencyRank for comparison: image similarities, and VLMs that were not trained as a judge.

  python eval.py --scorer clip_i                       cosine of OpenCLIP image features
  python eval.py --scorer dreamsim                     DreamSim (pip install dreamsim)
  python eval.py --scorer histogram                    overlap of the color histograms
  python eval.py --scorer Qwen/Qwen2.5-VL-7B-Instruct  any VLM, folder or hub name, asked as by eval_vllm.py
  python eval.py --model PaCo-Reward-7B --port 8000    the model served at this port

Weights come from the hub (DreamSim: from its authors' release page). Local ones:

  python eval.py --scorer clip_i --weights FOLDER      open_clip_config.json and open_clip_model.safetensors,
                                                       as `hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K` stores it
  python eval.py --scorer clip_i --weights FILE.safetensors --clip_model ViT-L-14
  python eval.py --scorer clip_i --clip_model hf-hub:laion/CLIP-ViT-L-14-laion2B-s32B-b82K
  python eval.py --scorer dreamsim --weights FOLDER    the unpacked release
  python eval.py --scorer dreamsim --dreamsim_type open_clip_vitb32    a smaller DreamSim

Similarities are in [0, 1]; a cosine becomes (1 + cosine) / 2, which gives the same ranking. Results, resuming, broken
items and the exit status are as in eval_vllm.py. The file is <results_dir>/<scorer>.jsonl, for a VLM
<model>-v<template>.jsonl or <model>-v<question>.jsonl; print_eval_table.py prints all of them in one table.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from consistency_rank import add_arguments, load_bench, run_judge

from paco_eval.baselines import BASELINES, CLIP_MODEL, DREAMSIM_TYPE, baseline_names, make_baseline
from paco_eval.results import BenchError, fingerprint
from paco_eval.runner import exit_status, new_parser, parse, run_benchmark
from paco_judge.questions import load_question

OPTIONS_OF = {"weights": ("clip_i", "dreamsim"), "clip_model": ("clip_i",), "dreamsim_type": ("dreamsim",)}


def evaluate(args: argparse.Namespace) -> int:
    """Run the scorer; returns the number of items without a result."""
    for option, scorers in OPTIONS_OF.items():
        if getattr(args, option) and args.scorer not in scorers:
            raise BenchError(f"--scorer {args.scorer} does not use --{option}")
    if args.scorer not in BASELINES:
        return run_judge(args)
    items = load_bench(args.dataset_dir, load_question("pair"))  # a baseline ignores the question
    options = (args.scorer, args.weights, args.clip_model or args.dreamsim_type)
    exact, short = baseline_names(*options)
    places = [args.weights, *sorted(Path(args.weights).glob("*/"))] if args.weights else []  # DreamSim has subfolders
    stamp = {"model": exact, "weights": fingerprint(*places)}
    file = Path(args.results_dir) / f"{short}.jsonl"
    return run_benchmark(
        items, file, stamp, lambda: (args.scorer, make_baseline(*options, args.batch_size)), args.batch_size
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit status as in eval_vllm.py."""
    parser = new_parser(__doc__)
    parser.add_argument("--scorer", help=f"{', '.join(BASELINES)}, or a VLM's folder or hub name; default: --model")
    parser.add_argument("--weights", help="local weights of clip_i (folder or .safetensors) or dreamsim (folder)")
    parser.add_argument("--clip_model", help=f"OpenCLIP architecture, or hf-hub:NAME; default: {CLIP_MODEL}")
    parser.add_argument("--dreamsim_type", help=f"type of DreamSim; default: {DREAMSIM_TYPE}")
    add_arguments(parser)
    args = parse(parser, arguments)
    if args.scorer not in (None, *BASELINES):
        args.model = args.scorer
    return exit_status(evaluate, args)


if __name__ == "__main__":
    sys.exit(main())
