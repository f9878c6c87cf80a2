"""Make images with a trained adapter, at any resolution, with the same sampler as the evaluation.

python scripts/generate.py --config config/grpo.py:NAME [--config.a.b=value …] --adapter DIR --prompt TEXT [--prompt TEXT …]
    --adapter DIR        folder of a checkpoint's adapter/ (PEFT) or diffusers/; leave it out for the base model
    --prompts-file FILE  one prompt a line, or a *_metadata.jsonl
    --seeds 0,1,2        one image per prompt and seed        --output DIR   default: generated
Resolution, steps and batch size are config.test.{resolution,num_steps,batch_size}.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the rest, which is the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts-file", type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--output", type=Path, default=Path("generated"))
    return parser.parse_known_args(arguments)


def read_items(prompts: list[str], file: Path | None) -> list:
    """Items of prompts given one by one and in a file."""
    from paco_grpo.types import Item

    rows: list[dict] = [{"prompt": prompt} for prompt in prompts]
    if file is not None:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows += [json.loads(line) if file.suffix == ".jsonl" else {"prompt": line} for line in lines]
    return [
        Item(number, row["prompt"], row.get("height"), row.get("width"), metadata=row)
        for number, row in enumerate(rows)
    ]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    own, rest = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    import torch

    from paco_grpo.policies import PolicyLoadError, load_policy
    from paco_grpo.policies.adapters import add_lora
    from paco_grpo.training.collect import batches_by_size, size_of
    from paco_grpo.training.configuration import ConfigError, apply_overrides, load_config, parse_command_line
    from paco_grpo.training.evaluation import contact_sheet, draw

    try:
        source, overrides = parse_command_line(rest)
        config = load_config(source, ROOT / "config" / "base.py")
        apply_overrides(config, overrides)
        items = read_items(own.prompt, own.prompts_file)
        if not items:
            raise ConfigError("nothing to draw: give --prompt TEXT or --prompts-file FILE")
        policy = load_policy(
            config.pretrained.model,
            dtype=torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32,
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_sequence_length=config.max_sequence_length,
            guidance_scale=config.sample.guidance_scale,
        )
        if own.adapter:
            add_lora(policy, lora_path=own.adapter)
    except (ConfigError, PolicyLoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = [(item, int(seed)) for item in items for seed in own.seeds.split(",")]
    sizes = [size_of(item, config.test.resolution, config.item_size, policy) for item, _ in wanted]
    own.output.mkdir(parents=True, exist_ok=True)
    images: dict[int, object] = {}
    for batch in batches_by_size(sizes, config.test.batch_size):
        chosen = [wanted[i] for i in batch]
        drawn = draw(
            policy, [item for item, _ in chosen], [seed for _, seed in chosen], *sizes[batch[0]], config.test.num_steps
        )
        for i, image in zip(batch, drawn, strict=True):
            image.save(own.output / f"{wanted[i][0].item_id:05d}_seed{wanted[i][1]}.png")
            images[i] = image
    contact_sheet([images[i] for i in sorted(images)]).save(own.output / "sheet.png")
    print(f"{len(images)} images and sheet.png in {own.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
