"""The README.md of a saved adapter: its base model, how to use it, how it was trained."""

from pathlib import Path

import yaml

from paco_grpo.options import RunOptions
from paco_grpo.options.parse import options_to_yaml
from paco_grpo.policies import Policy


def write_model_card(folder: Path, options: RunOptions, policy: Policy, epochs: int) -> None:
    """Write ``folder/README.md``, where ``folder`` is ``adapter`` (PEFT) or ``diffusers`` of a checkpoint."""
    peft, model = folder.name == "adapter", options.pretrained.model
    train, test = options.train, options.test
    head = {
        "base_model": model,
        "library_name": "peft" if peft else "diffusers",
        "pipeline_tag": "image-to-image" if policy.needs_image else "text-to-image",
        "tags": ["lora", "paco-rl", "flow-grpo", "reinforcement-learning"],
    }
    use = [
        "import torch\nfrom diffusers import DiffusionPipeline",
        f"\npipe = DiffusionPipeline.from_pretrained({model!r}, torch_dtype=torch.bfloat16).to('cuda')",
        "pipe.load_lora_weights('FOLDER OF THIS FILE')",
    ]
    if peft:
        use[-1] = (
            "pipe.transformer = PeftModel.from_pretrained(pipe.transformer, 'FOLDER OF THIS FILE')"
        )
        use.insert(1, "from peft import PeftModel")
    if policy.pipeline_setup:
        use.append(f"\n\n{policy.pipeline_setup}")
    guidance = f"guidance {options.sample.guidance_scale:g}"
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {options.run_name}",
        f"A LoRA for `{model}`, trained with PaCo-GRPO (arXiv 2512.04784) for {epochs} epochs at {train.resolution} px.",
        f"Use it at {test.resolution} px with {test.num_steps} steps and {guidance}.",
        "```python\n" + "\n".join(use) + "\n```",
        f"## Configuration\n\n```yaml\n{options_to_yaml(options)}```",
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
