"""Benchmarks: public prompts, and the rewards that measure their images."""

import dataclasses

from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.suggest import did_you_mean

# Name → prompt set as dataset/fetch.py writes it, its kind, the rewards that measure its images.
BENCHMARKS = {
    "t2is": ("dataset/public-t2is", "geneval", ("consistency_score", "subfig_clipT", "pickscore")),
    "gedit": ("dataset/public-gedit", "geneval_image", ("consistency_for_editing",)),
}


def options_for(options: RunOptions, benchmark: str) -> RunOptions:
    """``options`` with the test set and rewards of ``benchmark``, a name or ``name=folder``."""
    name, _, folder = benchmark.partition("=")
    if name not in BENCHMARKS:
        raise ConfigError(
            f"unknown benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} "
            f"Known: {', '.join(BENCHMARKS)}"
        )
    public, kind, rewards = BENCHMARKS[name]
    other_rewards = {*options.train.reward_fn, *options.test.reward_fn}
    for of_set in options.datasets.values():
        other_rewards.update(of_set.reward_fn, of_set.test_reward_fn)
    for _, _, names in BENCHMARKS.values():
        other_rewards.update(names)
    arguments = {}
    for reward, kwargs in options.test.reward_fn_kwargs.items():
        # Arguments of a name that no reward has are kept, so that they are refused.
        if reward in rewards or reward not in other_rewards:
            arguments[reward] = kwargs
    test = dataclasses.replace(
        options.test,
        reward_fn=dict.fromkeys(rewards, 1.0),
        reward_fn_kwargs=arguments,
        num_images=None,
        save_eval_images=True,
    )
    return dataclasses.replace(
        options, dataset=folder or public, datasets={}, prompt_fn=kind, test=test
    )
