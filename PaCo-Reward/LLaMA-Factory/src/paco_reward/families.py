"""What depends on the family of the base model: LLaMA-Factory's template, and how large the judge sees images.

LLaMA-Factory resizes images by ``image_max_pixels`` before the model's processor does, but servers have the processor
alone. Here the processor gets that limit, so that training, exports and servers resize once, alike.
"""

import json
from pathlib import Path
from typing import Any

from paco_judge.questions import CHAT_OPTIONS
from paco_judge.scorer import EDGES, PROCESSOR_FILES, set_limits
from paco_reward.errors import PacoRewardError

# LLaMA-Factory's template by the model_type of config.json: the prompt that the model's chat template renders.
TEMPLATES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink", "qwen3_5": "qwen3_5"}
_NO_LIMIT = 1 << 60


def with_template(config: dict[str, Any]) -> dict[str, Any]:
    """The training configuration without thinking, and with the template of its model unless it names one."""
    config = CHAT_OPTIONS | config
    if config.get("template"):
        return config
    from transformers import PretrainedConfig

    model = config.get("model_name_or_path")
    model_type = PretrainedConfig.get_config_dict(model)[0].get("model_type")
    if model_type not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise PacoRewardError(
            f"model {model} is of type {model_type}, not {known}; set template: (LLaMA-Factory's)"
        )
    return config | {"template": TEMPLATES[model_type]}


def check_prompt(template: Any, tokenizer: Any, chat_template: str | None) -> None:
    """Refuse a template whose prompt is not the one that servers render from the model's chat template."""
    if not isinstance(chat_template, str):
        return
    question = {"role": "user", "content": "Are they consistent?"}
    trained, _ = template.encode_oneturn(
        tokenizer, [question, {"role": "assistant", "content": "Yes."}]
    )
    served = tokenizer.apply_chat_template(
        [question],
        chat_template=chat_template,
        tokenize=False,
        add_generation_prompt=True,
        **CHAT_OPTIONS,
    )
    if tokenizer.decode(trained) != served:
        raise PacoRewardError(
            f"the training template's prompt {tokenizer.decode(trained)!r} is not the {served!r} of the model's chat "
            "template; set another template:, or choose a model that answers without thinking (-Instruct)"
        )


def limit_images(processor: Any, most: int) -> None:
    """Let the processor, not LLaMA-Factory, resize images, to at most ``most`` pixels and at most its own limit."""
    size = processor.image_processor.size
    set_limits(processor, {edge: min(size[edge], most) for edge in EDGES})
    processor.image_max_pixels, processor.image_min_pixels = _NO_LIMIT, 1


def write_limits(folder: Path, limits: dict[str, int]) -> None:
    """Change the limits in a model folder's files."""
    for file in filter(Path.is_file, (folder / name for name in PROCESSOR_FILES)):
        settings = json.loads(file.read_bytes())
        images = settings.get("image_processor", settings)
        if "patch_size" not in images:
            continue
        old_names = dict(
            zip(("min_pixels", "max_pixels"), limits.values(), strict=True)
        )  # they win over size
        images |= {"size": limits} | {
            name: value for name, value in old_names.items() if name in images
        }
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
