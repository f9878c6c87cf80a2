"""The README.md of a saved adapter: its base model, how to use it, how it was trained."""

from pathlib import Path

import torch
import yaml

from paco_grpo.atomic import write_atomically
from paco_grpo.options import RunOptions
from paco_grpo.options.parse import options_to_yaml
from paco_grpo.policies.diffusers_policy import DiffusersPolicy

_CONFIGURATION = "## Configuration\n"
_CHECK = "## Check\n"


def write_model_card(
    folder: Path, options: RunOptions, policy: DiffusersPolicy, epochs: int
) -> None:
    """Write ``README.md`` in ``folder``: ``adapter`` (PEFT) or ``diffusers`` of a checkpoint."""
    in_peft_format = folder.name == "adapter"
    edits = _edits_images(options, policy)
    model = options.pretrained.model
    head = {
        "base_model": model,
        "library_name": "peft" if in_peft_format else "diffusers",
        "pipeline_tag": "image-to-image" if edits else "text-to-image",
        "tags": ["lora", "paco-rl", "flow-grpo", "reinforcement-learning"],
    }
    code = [_loading(model, in_peft_format), policy.card_setup]
    if edits:
        code += [_size(options, policy), policy.card_reference]
    else:
        code.append(_square(options))
    code.append(_call(options, policy, edits))
    snippet = "\n".join(part.strip() + "\n" for part in code if part)
    origin = (
        f"A LoRA for `{model}`, trained with PaCo-GRPO (arXiv 2512.04784) for {epochs} epochs at "
        f"{options.train.resolution} px."
    )
    precision = (
        "In bfloat16 the pipeline also rounds norms, modulation and the adapter, which training "
        "kept in float32, so its images differ slightly from those of training."
    )
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {options.run_name}",
        origin,
        f"```python\n{snippet}```",
        precision,
        f"{_CONFIGURATION}\n```yaml\n{options_to_yaml(options)}```",
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def add_check(folder: Path, sentence: str) -> None:
    """Put the result of a verification into ``folder/README.md``, instead of an earlier one."""
    file = folder / "README.md"
    before, marker, configuration = file.read_text(encoding="utf-8").partition(_CONFIGURATION)
    before = before.partition(_CHECK)[0]
    write_atomically(file, f"{before}{_CHECK}\n{sentence}\n\n{marker}{configuration}")


def _edits_images(options: RunOptions, policy: DiffusersPolicy) -> bool:
    has_references = options.prompt_fn in ("geneval_image", "arrow_editing")
    return policy.needs_image or (policy.edits_images and has_references)


def _loading(model: str, in_peft_format: bool) -> str:
    imports = ["import torch", "from diffusers import DiffusionPipeline"]
    attach = "pipe.load_lora_weights('FOLDER OF THIS FILE')"
    if in_peft_format:
        imports.append("from peft import PeftModel")
        attach = (
            "pipe.transformer = PeftModel.from_pretrained(pipe.transformer, 'FOLDER OF THIS FILE')"
        )
    load = f"DiffusionPipeline.from_pretrained({model!r}, torch_dtype=torch.bfloat16)"
    return "\n".join([*imports, "", f"pipe = {load}.to('cuda')", attach])


def _square(options: RunOptions) -> str:
    side = options.test.resolution
    return f"width, height = {side}, {side}"


def _size(options: RunOptions, policy: DiffusersPolicy) -> str:
    side = options.test.resolution
    step = policy.size_step
    return f"""\
from PIL import Image, ImageOps

reference = Image.open('photo.png').convert('RGB')
# A size of about {side} x {side} pixels in the shape of the reference
scale = {side} / (reference.width * reference.height) ** 0.5
width = max(round(reference.width * scale / {step}), 1) * {step}
height = max(round(reference.height * scale / {step}), 1) * {step}
"""


def _call(options: RunOptions, policy: DiffusersPolicy, edits: bool) -> str:
    arguments = policy.card_arguments if edits else {}
    arguments = arguments | {
        "prompt": "'make the sky red'" if edits else "'a red fox'",
        "width": "width",
        "height": "height",
        "num_inference_steps": str(options.test.num_steps),
        "max_sequence_length": str(policy.max_sequence_length),
    }
    for name, value in policy.guidance_arguments().items():
        arguments[name] = repr(value)
        if isinstance(value, torch.Tensor):  # a negative prompt's features
            text = f"{policy.negative_prompt!r}, max_sequence_length={policy.max_sequence_length}"
            arguments[name] = f"pipe.encode_prompt({text})[0]"
    arguments["generator"] = "torch.Generator().manual_seed(0)"
    lines = [f"    {name}={source},\n" for name, source in arguments.items()]
    return f"image = pipe(\n{''.join(lines)}).images[0]\nimage.save('image.png')\n"
