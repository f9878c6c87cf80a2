"""The README.md of a saved adapter: its base model, how to use it, how it was trained."""

from pathlib import Path

import torch
import yaml

from paco_grpo.data.sets import has_references
from paco_grpo.options import RunOptions, options_to_yaml
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_judge.files import write_atomically

_CONFIGURATION = "## Configuration\n"
_CHECK = "## Check\n"
_CARD = """\
---
{head}---

# {name}

A LoRA for `{model}`, trained with PaCo-GRPO (arXiv 2512.04784) for {epochs} epochs at \
{side} px and {tokens} text tokens.

```python
import torch
from diffusers import DiffusionPipeline
{import_of_edits}
pipe = DiffusionPipeline.from_pretrained({model!r}, torch_dtype=torch.bfloat16).to('cuda')
{attach}
{setup}image = pipe(
{arguments}).images[0]
image.save('image.png')
```

In bfloat16 the pipeline also rounds norms, modulation and the adapter, which training kept in \
float32, so its images differ slightly from those of training.{size_of_edits}

{configuration}
```yaml
{options}```
"""
_IMPORT_OF_EDITS = "from diffusers.utils import load_image\n"
_SIZE_OF_EDITS = """ It also chooses \
another size for the reference image; `scripts/generate.py` of PaCo-GRPO does not."""
_ATTACH = {
    "diffusers": "{load}('FOLDER OF THIS FILE', use_safetensors=True)",
    "adapter": (
        "from peft import PeftModel\n"
        "pipe.transformer = PeftModel.from_pretrained(pipe.transformer, 'FOLDER OF THIS FILE')"
    ),
}


def write_model_card(
    folder: Path, options: RunOptions, policy: DiffusersPolicy, epochs: int
) -> None:
    """Write ``README.md`` in ``folder``: ``adapter`` (PEFT) or ``diffusers`` of a checkpoint."""
    edits = policy.needs_image or (policy.edits_images and has_references(options))
    head = {
        "base_model": options.pretrained.model,
        "library_name": "peft" if folder.name == "adapter" else "diffusers",
        "pipeline_tag": "image-to-image" if edits else "text-to-image",
        "tags": ["lora", "paco-rl", "flow-grpo", "reinforcement-learning"],
    }
    side = options.test.resolution
    arguments = {
        "prompt": repr("make the sky red" if edits else "a red fox"),
        **policy.length_arguments(side, side),
        "num_inference_steps": options.test.num_steps,
        "generator": "torch.Generator().manual_seed(0)",
    }
    if edits:
        arguments["image"] = "load_image('photo.png')"
    for name, value in policy.guidance_arguments().items():
        arguments[name] = repr(value)
        if isinstance(value, torch.Tensor):  # a negative prompt's features
            text = f"{policy.negative_prompt!r}, max_sequence_length={policy.max_sequence_length}"
            arguments[name] = f"pipe.encode_prompt({text})[0]"
    has_loader = hasattr(policy.pipeline, "load_lora_weights")
    load = "pipe.load_lora_weights" if has_loader else "pipe.transformer.load_lora_adapter"
    card = _CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        import_of_edits=_IMPORT_OF_EDITS if edits else "",
        size_of_edits=_SIZE_OF_EDITS if edits else "",
        name=options.run_name,
        model=options.pretrained.model,
        epochs=epochs,
        side=options.train.resolution,
        tokens=options.train.max_sequence_length or policy.max_sequence_length,
        attach=_ATTACH[folder.name].format(load=load),
        setup=policy.card_setup,
        arguments="".join(f"    {name}={value},\n" for name, value in arguments.items()),
        configuration=_CONFIGURATION,
        options=options_to_yaml(options),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def add_check(folder: Path, sentence: str) -> None:
    """Put the result of a verification into ``folder/README.md``, instead of an earlier one."""
    file = folder / "README.md"
    before, marker, configuration = file.read_text(encoding="utf-8").partition(_CONFIGURATION)
    before = before.partition(_CHECK)[0]
    write_atomically(file, f"{before}{_CHECK}\n{sentence}\n\n{marker}{configuration}")
