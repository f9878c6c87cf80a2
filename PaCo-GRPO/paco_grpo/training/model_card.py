"""The README.md of a saved adapter: its base model, how to use it, how it was trained."""

import re
import shutil
from pathlib import Path

import torch
import yaml

from paco_grpo.data.sets import has_references
from paco_grpo.options import RunOptions, options_to_yaml
from paco_grpo.policies import POLICIES, comfyui
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_judge.files import write_atomically

_CONFIGURATION = "## Configuration\n"
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
{arguments}){first_image}
image.save('image.png')
```

In bfloat16 the pipeline also rounds norms, modulation and the adapter, which training kept in \
float32, so its images differ slightly from those of training.{size_of_edits}

{comfyui}{configuration}
```yaml
{options}```
"""
_IMPORT_OF_EDITS = "from diffusers.utils import load_image\n"
_SIZE_OF_EDITS = """ It also chooses \
another size for the reference image; `scripts/generate.py` of PaCo-GRPO does not."""
_COMFYUI = """\
## ComfyUI

{advice} Tried on tiny weights: {tried}. Not tried: ComfyUI's nodes, VAE and sampler.

"""
_COMFYUI_LOADS = """\
Copy `pytorch_lora_weights.safetensors` to `models/loras` under a name of its own, and load it with \
strength 1."""
_COMFYUI_UNKNOWN = """\
## ComfyUI

It is not known whether ComfyUI loads this adapter.

"""
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
    has_images = type(policy.pipeline).__name__ in POLICIES  # outputs of others have other names
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
        first_image=".images[0]" if has_images else "[0][0]",
        arguments="".join(f"    {name}={value},\n" for name, value in arguments.items()),
        comfyui=_comfyui(policy) if folder.name == "diffusers" else "",
        configuration=_CONFIGURATION,
        options=options_to_yaml(options),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _comfyui(policy: DiffusersPolicy) -> str:
    """What ComfyUI does with the file in diffusers' format."""
    names = comfyui.names_of(policy)
    if names is None:
        return _COMFYUI_UNKNOWN
    advice = _COMFYUI_LOADS
    skipped = comfyui.skipped_layers(policy)
    if skipped:
        advice += f" **{skipped}.**"
    return _COMFYUI.format(advice=advice, tried=names.tried)


def add_check(folder: Path, sentence: str) -> None:
    """Put the result of a verification into ``folder/README.md``, instead of an earlier one."""
    _set_section(folder, "Check", sentence)


def add_evaluation(folder: Path, sentence: str, sheet: Path) -> None:
    """Put an evaluation into ``folder/README.md``, with a copy of its contact sheet beside it.

    Into the copy of a whole transformer, which has no card, only the sheet.
    """
    if sheet.is_file():  # otherwise no image was finite
        shutil.copyfile(sheet, folder / "sheet.png")
        sentence = f"{sentence}\n\n![Images of the evaluation](sheet.png)"
    if (folder / "README.md").is_file():
        _set_section(folder, "Evaluation", sentence)


def _set_section(folder: Path, title: str, text: str) -> None:
    """Put a section before the configuration of ``folder/README.md``, instead of an earlier one."""
    file = folder / "README.md"
    before, marker, configuration = file.read_text(encoding="utf-8").partition(_CONFIGURATION)
    before = re.sub(rf"^## {title}\n.*?(?=^## |\Z)", "", before, flags=re.DOTALL | re.MULTILINE)
    write_atomically(file, f"{before}## {title}\n\n{text}\n\n{marker}{configuration}")
