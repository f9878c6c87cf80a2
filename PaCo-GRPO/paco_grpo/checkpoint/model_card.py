"""The README.md of a saved adapter: its base model, how to use it, how it was trained, what it scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from paco_grpo.options import RunOptions
from paco_grpo.options.parse import options_to_yaml
from paco_grpo.policies import Policy


def write_model_card(
    folder: Path, options: RunOptions, policy: Policy, *, epoch: int, step: int, evaluation: Mapping | None
) -> None:
    """Write ``folder/README.md``, where ``folder`` is ``adapter`` (PEFT) or ``diffusers`` of a checkpoint.

    ``evaluation`` is the latest row of an evaluation in metrics.jsonl, None if there is none yet.
    """
    peft = folder.name == "adapter"
    head = {
        "base_model": options.pretrained.model,
        "library_name": "peft" if peft else "diffusers",
        "pipeline_tag": "image-to-image" if policy.needs_image else "text-to-image",
        "tags": ["lora", "paco-rl", "flow-grpo", "reinforcement-learning"],
    }
    rewards = [f"| `{name}` | {weight:g} |" for name, weight in options.train.reward_fn.items()]
    use = [
        "import torch",
        "from diffusers import DiffusionPipeline",
        *(["from peft import PeftModel"] if peft else []),
        "",
        f"pipe = DiffusionPipeline.from_pretrained({options.pretrained.model!r}, torch_dtype=torch.bfloat16).to('cuda')",
        "pipe.transformer = PeftModel.from_pretrained(pipe.transformer, 'FOLDER OF THIS FILE')"
        if peft
        else "pipe.load_lora_weights('FOLDER OF THIS FILE')",
        *([f"\n\n{policy.pipeline_setup}"] if policy.pipeline_setup else []),
    ]
    origin = (
        f"A LoRA for `{options.pretrained.model}`, trained with PaCo-GRPO (arXiv 2512.04784), objective "
        f"`{options.train.loss_type}`, for {epoch} epochs ({step} optimizer steps)."
        + (" The weights are the run's moving average." if options.train.ema else "")
    )
    guidance = f"guidance {options.sample.guidance_scale:g}" if policy.samples_guided else "no guidance"
    sizes = (
        f"Scores below are of {options.test.num_steps} steps at {options.test.resolution} px, {guidance}; it was "
        f"trained at {options.train.resolution} px."
    )
    data = (
        f"Prompt set `{options.dataset}` (`{options.prompt_fn}`): {options.sample.unique_sample_num_per_epoch} prompts x "
        f"{options.sample.num_images_per_prompt} images an epoch."
    )
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {options.run_name}",
        origin,
        "## Use\n\n```python\n" + "\n".join(use) + f"\n```\n\n{sizes}",
        f"## Data\n\n{data}",
        "## Rewards\n\n| reward | weight |\n|---|---|\n" + "\n".join(rewards),
        "## Evaluation\n\n" + _evaluation(evaluation),
        f"## Configuration\n\n```yaml\n{options_to_yaml(options)}```",
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _evaluation(row: Mapping | None) -> str:
    if row is None:
        return "Not evaluated yet when this was saved."
    lines = [f"After epoch {row['epoch']}, {row['eval/num_images']:.0f} images of the test set.", "", "| reward | mean |", "|---|---|"]
    for key, value in row.items():
        if key.startswith("eval/") and key.endswith("_mean"):
            name = key.removeprefix("eval/").removesuffix("_mean")
            error = row.get(f"eval/{name}_stderr")
            lines.append(f"| `{name}` | {value:.4f}" + (f" ± {error:.4f} |" if error is not None else " |"))
    return "\n".join(lines)
