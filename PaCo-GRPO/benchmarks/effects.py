"""What an option changes: sampling time, images, and the ratio with which training begins, against the plain configuration.

    python benchmarks/effects.py --config config/grpo.py:toy_t2is \\
        --setting sample.tail_steps=2 --setting sample.tail_steps=2,sample.tail_order=2 --setting max_sequence_length=0

A setting is one or more options with commas between (``2/4`` stands for the list 2,4). Each draws the same prompts from
the same seeds; settings take turns within a round, in another order each time, and ratios are medians of the ratios within
a round. The LoRA is random and small, as after some training (--lora-scale), for without one merging changes nothing.

Written: time of a batch (denoising and decoding) and its ratio; root mean square and largest difference of pixels
(of 0 to 1); |ratio − 1| of the recorded log-probability against the forward with gradient that training makes.
"""

import argparse
import dataclasses
import logging
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from ml_collections import ConfigDict

from measuring import machine
from paco_grpo.data.prompts import load_prompts
from paco_grpo.policies import Policy
from paco_grpo.policies.adapters import add_lora, trainable_parameters
from paco_grpo.sampling.rollout import record_transition, rollout
from paco_grpo.training.collect import at_size
from paco_grpo.training.configuration import apply_overrides, read_config
from paco_grpo.training.generator import load_generator
from paco_grpo.training.speed import apply_speed, check_speed, tail_of
from paco_grpo.training.texts import settle_text_length

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass
class Setting:
    """One configuration and what was found with it."""

    name: str
    config: ConfigDict
    policy: Policy
    seconds: list[float] = dataclasses.field(default_factory=list)
    pixels: np.ndarray | None = None
    deviation: float = 0.0

    def run(self, items: list, first_seed: int) -> None:
        """Draw a batch of ``items``, timed, and recompute its log-probabilities with gradient."""
        config, sample = self.config, self.config.sample
        drawn = [at_size(item, config.train.resolution, config.item_size, self.policy) for item in items]
        size = drawn[0].height, drawn[0].width
        conditioning = self.policy.encode(drawn)
        started = synchronised()
        record = rollout(
            self.policy, conditioning, [item.item_id for item in items], [first_seed + i for i in range(len(items))], *size,
            num_steps=sample.num_steps, noise_steps=sample.noise_steps, noise_level=sample.noise_level, cps=sample.cps,
            merge_lora=sample.merge_lora, tail=tail_of(config),
        )  # fmt: skip
        images = self.policy.decode(record.clean_latents, *size)
        self.seconds.append(synchronised() - started)
        self.pixels = np.stack([np.asarray(image, dtype=np.float64) / 255 for image in images])
        for position in range(len(record.step_index)):
            now = record_transition(self.policy, record, position).log_prob(record.next_latents[:, position])
            ratio = (now - record.log_prob[:, position]).exp().detach()
            self.deviation = max(self.deviation, float((ratio - 1).abs().max()))


def synchronised() -> float:
    """The time, once the device has done what it was asked."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def overrides_of(text: str) -> list[tuple[str, str]]:
    """``a.b=1,c=2/3`` → [("a.b", "1"), ("c", "2,3")]."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return [(key.strip().removeprefix("config."), value.replace("/", ",")) for key, _, value in pairs]


def build(rest: list[str], name: str, lora_scale: float) -> Setting:
    """A setting with a generator of its own, whose LoRA has the same random weights as the others'."""
    config, _ = read_config(rest, ROOT / "config" / "base.py")
    apply_overrides(config, overrides_of(name))
    items = [item for split in ("train", "test") for item in load_prompts(config.dataset, split, config.prompt_fn)]
    settle_text_length(config, items)
    check_speed(config, DEVICE)
    policy = load_generator(config, DEVICE)
    torch.manual_seed(0)
    add_lora(policy, config.train.lora_rank, config.train.lora_alpha)
    with torch.no_grad():
        for parameter in trainable_parameters(policy):
            parameter.add_(lora_scale * torch.randn(parameter.shape).to(parameter))
    if config.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    apply_speed(config, policy)
    return Setting(name or "plain", config, policy)


def summary(setting: Setting, plain: Setting) -> dict[str, float | str]:
    """A setting's row."""
    ratios = [own / base for own, base in zip(setting.seconds[1:], plain.seconds[1:], strict=True)]
    difference = np.abs(setting.pixels - plain.pixels)
    return {
        "setting": setting.name,
        "text_tokens": setting.config.max_sequence_length,
        "first_s": setting.seconds[0],
        "seconds": statistics.median(setting.seconds[1:]),
        "time_ratio": statistics.median(ratios),
        "time_ratio_min": min(ratios),
        "time_ratio_max": max(ratios),
        "pixel_rms": float(np.sqrt((difference**2).mean())),
        "pixel_max": float(difference.max()),
        "ratio_deviation": setting.deviation,
    }


def main(arguments: list[str]) -> int:
    """Measure, print the table, write the JSON; returns the exit status."""
    own, rest = parser().parse_known_args(arguments)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    settings = [build(rest, name, own.lora_scale) for name in ("", *own.setting)]
    config = settings[0].config
    items = load_prompts(config.dataset, "train", config.prompt_fn)
    items = [items[i % len(items)] for i in range(own.images)]
    order = np.random.default_rng(0)
    for turn in range(own.rounds + 1):
        for index in order.permutation(len(settings)):
            settings[index].run(items, first_seed=1000)
        print(f"round {turn} of {own.rounds}", file=sys.stderr)
    rows = [summary(setting, settings[0]) for setting in settings]
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if own.output:
        said = {"options": rest, "images": own.images, "rounds": own.rounds, "threads": torch.get_num_threads()}
        machine.write(own.output, machine.report("effects", said, rows=rows, device=DEVICE.type))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line, but for the options of the configuration."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--setting", action="append", default=[], help="see above; may be repeated")
    made.add_argument("--images", type=int, default=4, help="a batch")
    made.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    made.add_argument("--lora-scale", type=float, default=0.01, help="standard deviation of the LoRA's second matrices")
    made.add_argument("--output", type=Path, help="JSON; tables.py turns it into a table and a plot")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
