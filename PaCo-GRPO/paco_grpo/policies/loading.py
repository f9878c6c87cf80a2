"""Find the policy class of a model, load it, and count the tokens of its texts."""

import inspect
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from huggingface_hub import snapshot_download
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paco_grpo.names import find_function
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.options.schema import PretrainedOptions
from paco_grpo.policies.base import Policy, PolicyLoadError, PolicySettings
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.generic import GenericPolicy, generic_policy, guidance_argument
from paco_grpo.policies.models import part_classes
from paco_grpo.policies.speed import compile_blocks, set_attention
from paco_grpo.types import Item
from paco_judge.errors import UserError
from paco_judge.weights import explain_missing

logger = logging.getLogger(__name__)

_TEXT_MULTIPLE = 64  # tokens: what attention kernels and matrix products divide well

# Pipeline class named in model_index.json -> "module:class" of a ``DiffusersPolicy``, imported on
# use. Others get the generic policy.
POLICIES: dict[str, str] = {
    "FluxPipeline": "paco_grpo.policies.flux:FluxPolicy",
    "FluxKontextPipeline": "paco_grpo.policies.flux_kontext:FluxKontextPolicy",
    "Flux2Pipeline": "paco_grpo.policies.flux2:Flux2Policy",
    "Flux2KleinPipeline": "paco_grpo.policies.flux2:Flux2KleinPolicy",
    "Krea2Pipeline": "paco_grpo.policies.krea2:Krea2Policy",
    "LongCatImagePipeline": "paco_grpo.policies.longcat_image:LongCatImagePolicy",
    "LongCatImageEditPipeline": "paco_grpo.policies.longcat_image:LongCatImageEditPolicy",
    "QwenImagePipeline": "paco_grpo.policies.qwen_image:QwenImagePolicy",
    "QwenImage21Pipeline": "paco_grpo.policies.qwen_image_21:QwenImage21Policy",
    "QwenImageEditPipeline": "paco_grpo.policies.qwen_image_edit:QwenImageEditPolicy",
    "QwenImageEditPlusPipeline": "paco_grpo.policies.qwen_image_edit:QwenImageEditPlusPolicy",
    "StableDiffusion3Pipeline": "paco_grpo.policies.stable_diffusion_3:StableDiffusion3Policy",
    "ZImagePipeline": "paco_grpo.policies.z_image:ZImagePolicy",
}

# What a pipeline is refused for before its weights are downloaded: part, its class, the message.
_REQUIRED_PARTS = (
    (
        "scheduler",
        FlowMatchEulerDiscreteScheduler,
        "its scheduler in model_index.json is no FlowMatchEulerDiscreteScheduler",
    ),
    ("transformer", PeftAdapterMixin, "its transformer takes no LoRA"),
    ("vae", ModelMixin, "it has no VAE"),
)

GENERIC = "generic"  # as ``config.pretrained.policy``

# Words in the names of models that were distilled to few steps.
_DISTILLED = ("turbo", "schnell", "lightning", "lcm")


def load_policy(
    model_path: str | Path,
    settings: PolicySettings = PolicySettings(),  # noqa: B008 - frozen
    policy_name: str | None = None,
) -> DiffusersPolicy:
    """Load the generator at ``model_path``.

    Args:
        model_path: Diffusers pipeline folder, or a hub name such as
            ``black-forest-labs/FLUX.1-dev``.
        settings: Precision, device and guidance.
        policy_name: As ``config.pretrained.policy``.

    Raises:
        PolicyLoadError: The model cannot be loaded, or has no true CFG for the negative prompt.
    """
    policy = policy_class(PretrainedOptions(model=str(model_path), policy=policy_name))
    if settings.negative_prompt is not None and not policy.has_true_cfg:
        raise PolicyLoadError(
            f"config.sample.negative_prompt={settings.negative_prompt!r}: the guidance of "
            f"{model_path} is embedded, leave it at None"
        )
    return policy.from_pretrained(model_path, settings)


def load_generator(options: RunOptions, device: torch.device | str) -> DiffusersPolicy:
    """``config.pretrained.model`` in the precision and with the guidance of ``options``."""
    if options.speed.compile and torch.device(device).type == "cuda":
        from paco_judge.compiler import missing_for_compilation

        problem = missing_for_compilation()
        if problem:
            raise ConfigError(f"config.speed.compile=True: {problem}")
    # They warn of each truncated prompt, where we count them once.
    for name in ("diffusers", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if are_progress_bars_disabled():  # as on every process but one
        diffusers.utils.logging.disable_progress_bar()
    pretrained = options.pretrained
    if policy_name(pretrained) == GENERIC:
        _log_generic(options)
    return load_policy(pretrained.model, policy_settings(options, device), pretrained.policy)


def _log_generic(options: RunOptions) -> None:
    """Say that the generic policy is used, and which options are not the pipeline's defaults."""
    policy = policy_class(options.pretrained)
    defaults = pipeline_defaults(policy)
    settings = policy_settings(options, "cpu")
    others = []
    for option in ("sample.guidance_scale", "sample.negative_prompt", "max_sequence_length"):
        name = option.rpartition(".")[2]
        value = getattr(settings, name)
        default = getattr(defaults, name)
        if value != default:
            others.append(f"config.{option}={value!r} (the pipeline: {default!r})")
    logger.info(
        "%s is driven by its own call (config.pretrained.policy=generic). "
        "config.sample.noise_level and noise_steps were chosen for FLUX.1's shift. %s",
        policy.pipeline_class.__name__,
        f"Not its defaults: {', '.join(others)}" if others else "Its other defaults are used.",
    )


def policy_settings(options: RunOptions, device: torch.device | str) -> PolicySettings:
    """How ``options`` load the generator."""
    return PolicySettings(
        dtype=torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32,
        device=device,
        max_sequence_length=options.max_sequence_length,
        guidance_scale=options.sample.guidance_scale,
        negative_prompt=options.sample.negative_prompt,
        quantize=options.pretrained.quantize,
    )


def apply_speed(options: RunOptions, policy: Policy) -> None:
    """Apply ``config.speed`` to a policy that has its adapters and is placed."""
    speed = options.speed
    # PyTorch would choose cuDNN's attention by itself on compute capability 9.0 and 10.0 (H100,
    # B200), whose backward returns NaN for some masked inputs (pytorch#196678), and on an H100 did
    # without a mask.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if speed.attention is not None:
        set_attention(policy, speed.attention)
    if speed.compile:
        compile_blocks(policy)
    policy.offload(text_encoders=speed.offload_text, vae=speed.offload_vae)


def policy_class(pretrained: PretrainedOptions) -> type[DiffusersPolicy]:
    """The class that drives the generator ``pretrained.model``. Raises PolicyLoadError."""
    return policy_of(pipeline_class(pretrained.model), pretrained.policy)


def policy_name(pretrained: PretrainedOptions) -> str:
    """Where the class that drives the generator is: ``generic``, or ``package.module:Class``.

    Raises PolicyLoadError.
    """
    return pretrained.policy or _usual_policy(pipeline_class(pretrained.model))


def _usual_policy(pipeline: type[DiffusionPipeline]) -> str:
    return POLICIES.get(pipeline.__name__, GENERIC)


def policy_of(pipeline: type[DiffusionPipeline], name: str | None = None) -> type[DiffusersPolicy]:
    """The class that drives pipelines of class ``pipeline``; ``name``: ``config.pretrained.policy``.

    Raises PolicyLoadError: It cannot be imported, or drives another transformer.
    """
    name = name or _usual_policy(pipeline)
    if name == GENERIC:
        return generic_policy(pipeline)
    try:
        policy = find_function(name, [GENERIC])
    except ValueError as error:
        raise PolicyLoadError(f"config.pretrained.policy={error}") from error
    if not (isinstance(policy, type) and issubclass(policy, DiffusersPolicy)):
        raise PolicyLoadError(
            f"config.pretrained.policy={name!r} is no subclass of DiffusersPolicy: see "
            "docs/recipes.md#a-generator"
        )
    transformers = {_transformer_of(pipeline), _transformer_of(policy.pipeline_class)} - {None}
    if len(transformers) > 1:
        raise PolicyLoadError(
            f"config.pretrained.policy={name!r} is for {policy.pipeline_class.__name__}, but "
            f"config.pretrained.model is a {pipeline.__name__}; None takes the class that fits"
        )
    return policy


def _transformer_of(pipeline: type[DiffusionPipeline]) -> str | None:
    """Name of the class of its transformer; None where it has no annotation."""
    part = inspect.signature(pipeline.__init__).parameters.get("transformer")
    if part is None or part.annotation is inspect.Parameter.empty:
        return None
    return getattr(part.annotation, "__name__", str(part.annotation))


def pipeline_class(model_path: str | Path) -> type[DiffusionPipeline]:
    """The class that ``model_index.json`` names; its parts are known to be loadable.

    Raises PolicyLoadError.
    """
    index = _read(model_path, "model_index.json")
    name = index.get("_class_name")
    pipeline = getattr(diffusers, str(name), None)
    if not isinstance(pipeline, type) or not issubclass(pipeline, DiffusionPipeline):
        raise PolicyLoadError(
            f"config.pretrained.model={model_path}: model_index.json names {name}, but diffusers "
            f"{diffusers.__version__} has no such pipeline"
        )
    parts = part_classes(index, model_path)
    for part, part_class, problem in _REQUIRED_PARTS:
        if not issubclass(parts.get(part, type(None)), part_class):
            raise PolicyLoadError(f"{name} cannot be trained: {problem}")
    return pipeline


@dataclass(frozen=True)
class PipelineDefaults:
    """What a pipeline's call does if it is told nothing but the prompt."""

    num_steps: int
    guidance_scale: float  # 1 in a pipeline that has none
    negative_prompt: str | None  # None: no true CFG
    max_sequence_length: int


def pipeline_defaults(policy: type[DiffusersPolicy]) -> PipelineDefaults:
    """The defaults of the pipeline that ``policy`` drives."""
    arguments = inspect.signature(policy.pipeline_class.__call__).parameters
    defaults = {name: argument.default for name, argument in arguments.items()}
    scale = guidance_argument(arguments)
    negative = None
    if policy.has_true_cfg and "true_cfg_scale" not in defaults:
        # These pipelines take None for an empty text, those with a true_cfg_scale for no guidance.
        negative = defaults.get("negative_prompt") or ""
    tokens = defaults.get("max_sequence_length") or policy.text_limit
    return PipelineDefaults(
        num_steps=defaults["num_inference_steps"],
        guidance_scale=float(defaults[scale]) if scale else 1.0,
        negative_prompt=negative,
        max_sequence_length=tokens,
    )


def size_multiple(pretrained: PretrainedOptions) -> int:
    """``Policy.size_multiple`` of the generator."""
    policy = policy_class(pretrained)
    return policy.size_multiple_with(_read(pretrained.model, "vae/config.json"))


def fewest_steps(model_path: str | Path) -> int:
    """The smallest number of steps for which the schedule of the generator exists."""
    return 2 if _read(model_path, "scheduler/scheduler_config.json").get("shift_terminal") else 1


def is_step_distilled(model_path: str | Path) -> bool:
    """Whether the generator was distilled to few steps.

    Its pipeline says so (FLUX.2 Klein), or its name does.
    """
    index = _read(model_path, "model_index.json")
    names = f"{index.get('_name_or_path', '')} {Path(model_path).name}".lower()
    return bool(index.get("is_distilled")) or any(word in names for word in _DISTILLED)


def text_length(
    options: RunOptions, items: Iterable[Item], option: str = "max_sequence_length"
) -> int:
    """Text tokens by ``option``, or where it is 0, what the prompts need.

    Training needs at most as many as an evaluation takes. A warning counts the prompts that will be
    truncated: two that differ only there are the same to the generator.
    """
    model = options.pretrained.model
    length = attrgetter(option)(options)
    policy = policy_class(options.pretrained)
    if length > policy.text_limit:
        raise ConfigError(
            f"config.{option}={length}: {model} supports at most {policy.text_limit}; 0: as needed"
        )
    tokenizer = load_tokenizer(options.pretrained)
    prompts = {item.prompt for item in items}
    if options.sample.negative_prompt:
        prompts.add(options.sample.negative_prompt)
    counts = [policy.count_tokens(tokenizer, prompt) for prompt in prompts]
    if length == 0 and issubclass(policy, GenericPolicy):
        # What its pipeline puts around a text is not counted.
        length = options.max_sequence_length or pipeline_defaults(policy).max_sequence_length
    elif length == 0:
        length = needed_length(counts, options.max_sequence_length or policy.text_limit)
    truncated = sum(tokens > length for tokens in counts) if policy.cuts_text else 0
    if truncated:
        logger.warning(
            "%d of %d prompts are longer than config.%s=%d tokens and will be truncated",
            truncated,
            len(counts),
            option,
            length,
        )
    return length


def needed_length(counts: Iterable[int], limit: int) -> int:
    """The tokens of the longest prompt, up to a multiple of 64 but not above ``limit``."""
    longest = max(counts, default=1)
    return min(limit, math.ceil(longest / _TEXT_MULTIPLE) * _TEXT_MULTIPLE)


def load_tokenizer(pretrained: PretrainedOptions) -> PreTrainedTokenizerBase:
    """The tokenizer that limits the prompts of the generator."""
    folder = policy_class(pretrained).tokenizer_folder
    # By its own path: as "subfolder", transformers asks for a config.json that tokenizers of
    # pipelines do not have.
    return AutoTokenizer.from_pretrained(
        local_folder(pretrained.model, f"{folder}/*", option="config.pretrained.model") / folder,
        trust_remote_code=False,
    )


def _read(model_path: str | Path, name: str) -> dict[str, Any]:
    folder = local_folder(model_path, name, option="config.pretrained.model")
    try:
        return json.loads((folder / name).read_bytes())
    except FileNotFoundError as error:
        raise PolicyLoadError(
            f"config.pretrained.model={model_path} has no {name}: give the folder that contains "
            "transformer/ and vae/"
        ) from error


def local_folder(place: str | Path, *patterns: str, option: str) -> Path:
    """``place`` if it is a folder, else the cached copy of that hub repository.

    The copy has the files of ``patterns``.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    try:
        with explain_missing(place):
            return Path(snapshot_download(str(place), allow_patterns=list(patterns)))
    except UserError as error:
        raise PolicyLoadError(f"{option}: {error}") from error
