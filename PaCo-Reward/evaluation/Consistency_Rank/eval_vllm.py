"""ConsistencyRank: rank candidates by the judge's P(Yes) against the reference.

  python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
  python eval_vllm.py --model X --server http://127.0.0.1:8000      a running server (bash vllm_server/launch.sh)
  python eval_vllm.py --model X --engine transformers               without vLLM
  python eval_vllm.py --model X --question mine.txt                 your own wording

vLLM runs in this process: use the interpreter that has vLLM (in this repository .venv-vllm/bin/python).

Every item is written to <results_dir>/<model>-v<template or question>.jsonl at once; the same command continues a run that was
stopped or killed. An item that cannot be scored is reported and left out. python print_eval_table.py prints the table
of all models and baselines (eval.py) in the folder. Exit status: 0 all items have a result, 1 some have none, 2 the
run could not continue, 130 stopped by Ctrl-C.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from consistency_rank import add_arguments, run_judge

from paco_eval.runner import exit_status, new_parser, parse


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = new_parser(__doc__)
    add_arguments(parser)
    return exit_status(run_judge, parse(parser, arguments))


if __name__ == "__main__":
    sys.exit(main())
