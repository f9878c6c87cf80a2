"""ConsistencyRank for comparison: similarities that no judge gives, and judges that were not trained for it.

  python eval.py --scorer clip_i                       cosine of OpenCLIP image features
  python eval.py --scorer dreamsim                     DreamSim (pip install dreamsim)
  python eval.py --scorer pixel                        mean difference of the images at 32 x 32
  python eval.py --scorer histogram                    how far the colour histograms overlap
  python eval.py --scorer Qwen/Qwen2.5-VL-7B-Instruct  any VLM, a folder or hub name, asked as eval_vllm.py asks

Weights come from the hub (DreamSim: from its authors' release page). Local ones:

  python eval.py --scorer clip_i --weights FOLDER      open_clip_config.json and open_clip_model.safetensors,
                                                       as `hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K` leaves it
  python eval.py --scorer clip_i --weights FILE.safetensors --clip_model ViT-L-14
  python eval.py --scorer clip_i --clip_model hf-hub:laion/CLIP-ViT-L-14-laion2B-s32B-b82K
  python eval.py --scorer dreamsim --weights FOLDER    the unpacked release
  python eval.py --scorer dreamsim --dreamsim_type open_clip_vitb32    a smaller DreamSim

Similarities are in [0, 1]; of a cosine it is (1 + cosine) / 2, which ranks as the cosine does. Results, resuming,
broken items and the exit status are those of eval_vllm.py; the file is <results_dir>/<scorer>.jsonl, for a VLM
<model>-v<template>.jsonl, and print_eval_table.py shows all of them in one table.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from rank_run import DEFAULT_TEMPLATE, add_bench_arguments, run, run_judge

from paco_eval.baselines import BASELINES, CLIP_MODEL, DREAMSIM_TYPE, baseline_names, make_baseline
from paco_eval.engines import add_engine_arguments
from paco_eval.errors import BenchError
from paco_eval.running import exit_status

OF_ONE = {"weights": ("clip_i", "dreamsim"), "clip_model": ("clip_i",), "dreamsim_type": ("dreamsim",)}
OF_VLMS = ("engine", "server", "adapter", "prompt_template")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", required=True, help=f"{', '.join(BASELINES)}, or a VLM's folder or hub name")
    parser.add_argument("--weights", help="local weights of clip_i (folder or .safetensors) or dreamsim (folder)")
    parser.add_argument("--clip_model", help=f"OpenCLIP architecture, or hf-hub:NAME; default: {CLIP_MODEL}")
    parser.add_argument("--dreamsim_type", help=f"which DreamSim; default: {DREAMSIM_TYPE}")
    add_bench_arguments(parser)
    add_engine_arguments(parser)
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """Raises BenchError for an option that the scorer would not read."""
    unread = [name for name, scorers in OF_ONE.items() if args.scorer not in scorers]
    unread += OF_VLMS if args.scorer in BASELINES else ()
    for name in unread:
        if getattr(args, name) is not None:
            whose = ", ".join(OF_ONE.get(name, ("a VLM",)))
            raise BenchError(f"--{name} is an option of {whose}; --scorer {args.scorer} does not read it")


def evaluate(args: argparse.Namespace) -> int:
    """Run the scorer; returns the number of items without a result. Raises BenchError."""
    check(args)
    args.prompt_template = args.prompt_template or DEFAULT_TEMPLATE
    if args.scorer not in BASELINES:
        args.model = args.scorer
        return run_judge(args)
    exact, short = baseline_names(args.scorer, args.weights, args.clip_model, args.dreamsim_type)
    options = (args.weights, args.clip_model, args.dreamsim_type, args.batch_size)
    return run(args, exact, short, lambda: (args.scorer, make_baseline(args.scorer, *options)))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is that of eval_vllm.py."""
    args = parse(arguments)
    return exit_status(lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
