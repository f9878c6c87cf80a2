"""What depends on the family of the base model: the template, and how large the judge sees images.

LLaMA-Factory resizes images by ``image_max_pixels`` before the model's processor does, but servers
have the processor alone. Here the processor gets that limit, so that training, exports and servers
resize images once and in the same way.
"""

import os
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import read_json, write_json
from paco_judge.questions import CHAT_OPTIONS
from paco_judge.weights import PROCESSOR_FILES, explain_missing, lower_limits

# LLaMA-Factory's template by the model_type of config.json: the prompt that the model's chat
# template renders.
TEMPLATES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink", "qwen3_5": "qwen3_5"}
_OTHER_HUBS = ("USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB")  # LLaMA-Factory's variables
_NO_LIMIT = 1 << 60


def with_template(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without thinking, and with its model's template unless it names one.

    Raises:
        UserError: There is no such folder, and the hub has no such model; or no template is known.
    """
    from transformers import PretrainedConfig

    config = CHAT_OPTIONS | config
    model = config["model_name_or_path"]
    is_elsewhere = any(os.environ.get(name) for name in _OTHER_HUBS) and not Path(model).is_dir()
    settings: dict[str, Any] = {}
    if not is_elsewhere:
        names = {"revision": "model_revision", "cache_dir": "cache_dir", "token": "hf_hub_token"}
        options = {name: config.get(key) for name, key in names.items()}
        with explain_missing(model):  # LLaMA-Factory says only that it failed
            settings, _ = PretrainedConfig.get_config_dict(model, **options)
    if config.get("template"):
        return config
    model_type = settings.get("model_type")
    if model_type not in TEMPLATES:
        raise UserError(
            f"model {model} is of type {model_type}, not {', '.join(TEMPLATES)}; set template: "
            "(LLaMA-Factory's)"
        )
    return config | {"template": TEMPLATES[model_type]}


def check_prompt(template: Any, tokenizer: Any, chat_template: str | None) -> None:
    """Refuse a template whose prompt is not what servers render from the model's chat template."""
    if not isinstance(chat_template, str):
        return
    question = {"role": "user", "content": "Are they consistent?"}
    answer = {"role": "assistant", "content": "Yes."}
    prompt_ids, _ = template.encode_oneturn(tokenizer, [question, answer])
    trained = tokenizer.decode(prompt_ids)
    options = {"chat_template": chat_template, "tokenize": False, "add_generation_prompt": True}
    served = tokenizer.apply_chat_template([question], **options, **CHAT_OPTIONS)
    if trained != served:
        raise UserError(
            f"the training template's prompt {trained!r} is not the {served!r} of the model's chat "
            "template; set another template:, or choose a model that answers without thinking "
            "(-Instruct)"
        )


def limit_images(processor: Any, max_pixels: int) -> None:
    """Let the processor, not LLaMA-Factory, resize images, to ``max_pixels`` or its own limit."""
    lower_limits(processor, max_pixels)
    processor.image_max_pixels = _NO_LIMIT
    processor.image_min_pixels = 1


def write_limits(folder: Path, limits: dict[str, int]) -> None:
    """Change the limits in a model folder's files."""
    for name in PROCESSOR_FILES:
        file = folder / name
        if not file.is_file():
            continue
        settings = read_json(file)
        images = settings.get("image_processor", settings)
        if "patch_size" not in images:
            continue
        images["size"] = limits
        # Old names, which win over size where a file has them.
        for old_name, limit in zip(("min_pixels", "max_pixels"), limits.values(), strict=True):
            if old_name in images:
                images[old_name] = limit
        write_json(file, settings)
