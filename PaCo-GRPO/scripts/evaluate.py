"""Evaluate an adapter, or the base model, as a training run does: same items, seeds, size, steps and rewards.

python scripts/evaluate.py --config config/grpo.py:NAME [--config.a.b=value …] [--adapter DIR] [--output DIR]
    --adapter DIR   a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for the base model
    --output DIR    images, eval_data.jsonl, sheet.png, categories.md, metrics.json; default: evaluation
What is drawn and scored is config.test; through `accelerate launch` several processes share the images.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the rest, which is the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--output", type=Path, default=Path("evaluation"))
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done, 2 refused, 3 a reward failed."""
    own, rest = parse(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

    from paco_grpo.training.configuration import ConfigError, read_config

    try:
        config, _ = read_config(rest, ROOT / "config" / "base.py")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(config, own.adapter, own.output)


def run(config, adapter: str | None, output: Path) -> int:
    """Load, draw, score, and print; the heavy imports wait until the configuration is known to be readable."""
    from paco_grpo.data.prompts import DataError
    from paco_grpo.policies import PolicyLoadError
    from paco_grpo.rewards.registry import RewardError
    from paco_grpo.training.alone import evaluate_alone
    from paco_grpo.training.configuration import ConfigError
    from paco_grpo.training.scoring import ScoringError
    from paco_judge.client import JudgeError

    try:
        metrics = evaluate_alone(config, adapter, output)
    except (ConfigError, DataError, PolicyLoadError, RewardError, JudgeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ScoringError as error:
        print(f"error: a reward failed: {error}", file=sys.stderr)
        return 3
    if metrics is not None:
        report(metrics, output)
    return 0


def report(metrics: dict, output: Path) -> None:
    """Write the numbers and print the table."""
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    print((output / "categories.md").read_text(encoding="utf-8"), end="")
    print(f"{metrics['eval/num_images']:.0f} images, their scores and sheet.png in {output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
