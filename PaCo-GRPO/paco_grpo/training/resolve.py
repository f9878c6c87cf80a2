"""What options become once their model and prompts are known.

Nothing else changes options: what is built after it, and what config.yaml records, is the same
object.
"""

import dataclasses
from collections.abc import Sequence

from paco_grpo.advantages.aggregation import describe
from paco_grpo.data.sets import load_items, prompt_sets
from paco_grpo.options import RunOptions
from paco_grpo.policies import policy_class
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.loading import pipeline_defaults, text_length
from paco_grpo.types import Item


def resolve_defaults(
    options: RunOptions, policy: type[DiffusersPolicy] | None = None
) -> RunOptions:
    """``options`` with the pipeline's defaults where they ask for them: before any check.

    ``policy``: the class that drives the model, if the caller knows it. Raises PolicyLoadError.
    """
    sample = options.sample
    test = options.test
    if None not in (sample.guidance_scale, options.max_sequence_length) and test.num_steps:
        return options
    defaults = pipeline_defaults(policy or policy_class(options.pretrained))
    if sample.guidance_scale is None:
        negative = sample.negative_prompt
        if negative is None:
            negative = defaults.negative_prompt
        sample = dataclasses.replace(
            sample, guidance_scale=defaults.guidance_scale, negative_prompt=negative
        )
    if not test.num_steps:
        test = dataclasses.replace(test, num_steps=defaults.num_steps)
    tokens = options.max_sequence_length
    if tokens is None:
        tokens = defaults.max_sequence_length
    return dataclasses.replace(options, sample=sample, test=test, max_sequence_length=tokens)


def resolve(options: RunOptions, items: Sequence[Item], run_name: str) -> RunOptions:
    """The options of a run.

    The model says how many tokens its texts need. A function that aggregates rewards becomes its
    description, which config.yaml can hold.

    Args:
        options: The user's, checked.
        items: Those of training and of evaluations.
        run_name: The run's folder in ``config.save_dir``.

    Raises:
        ConfigError: The model takes fewer tokens.
        PolicyLoadError: The model's tokenizer cannot be loaded.
    """
    tokens = text_length(options, items)
    options = dataclasses.replace(options, run_name=run_name, max_sequence_length=tokens)
    train = options.train
    if train.max_sequence_length is not None:
        tokens = text_length(options, items, "train.max_sequence_length")
        train = dataclasses.replace(train, max_sequence_length=tokens)
    described = describe(train.aggregate_fn)
    train = dataclasses.replace(train, aggregate_fn=described)
    return dataclasses.replace(options, train=train)


def resolve_for_images(options: RunOptions) -> RunOptions:
    """The options of images outside of a run: their texts are as long as in its evaluations.

    The prompt set is read only if its texts decide. Raises UserError.
    """
    options = resolve_defaults(options)
    if options.max_sequence_length:
        return options
    sets = prompt_sets(options)
    items = [*load_items(sets, "train"), *load_items(sets, "test")]
    return dataclasses.replace(options, max_sequence_length=text_length(options, items))
