"""What the terminal shows of a run before its first result; config.yaml and plan.json have all."""

from collections.abc import Iterable, Mapping
from typing import Any

from paco_grpo.advantages.aggregation import describe
from paco_grpo.policies import lora
from paco_grpo.rewards.asking import ServerReward
from paco_grpo.rewards.contract import Reward
from paco_grpo.rewards.registry import CheckedReward
from paco_grpo.rewards.sets import RewardBySet
from paco_grpo.training.run import Run


def start_lines(run: Run, plan: Mapping[str, Any]) -> list[str]:
    """What is trained, evaluated and saved, how much of it, and how to watch and stop it.

    ``plan`` is what plan.json has.
    """
    options = run.options
    train = options.train
    weights = "whole transformer"
    if options.use_lora:
        weights = f"LoRA on {len(lora.lora_layers(run.state.policy))} layers"
    sets = ""
    if "prompts_of_sets" in plan:
        parts = [f"{name} {prompts}" for name, prompts in plan["prompts_of_sets"].items()]
        sets = f" ({', '.join(parts)})"
    epoch = (
        f"{plan['prompts']} prompts{sets} × {plan['images_per_prompt']} images = "
        f"{plan['samples']} at {train.resolution} px; optimizer steps: "
        f"{train.num_inner_epochs * plan['gradient_steps']}"
    )
    processes = (
        f"{plan['num_processes']} ({plan['device']}, {plan['engine']}), each with "
        f"{plan['samples_per_process']} images in batches of {plan['sample_batch_size']}"
    )
    due = f"every {options.eval_freq} epochs and at the end" if options.eval_freq else "at the end"
    evaluation = (
        f"{options.test.num_images or len(run.test_items)} images at {options.test.resolution} px "
        f"{due}: {', '.join(run.rewards.test)}"
    )
    limit = ""
    if options.max_train_minutes is not None:
        limit = f", at most {options.max_train_minutes:g} minutes"
    return [
        f"model: {options.pretrained.model} ({run.state.policy.family}), {weights}",
        f"trained by {train.loss_type} on: {', '.join(_trained(run))}",
        *_servers(run.rewards.all().values()),
        f"an epoch: {epoch}",
        f"processes: {processes}",
        f"an evaluation: {evaluation}",
        f"until epoch {options.num_epochs}{limit}; Ctrl-C saves and stops",
        f"watch: python -m paco_grpo.report {run.folder}",
    ]


def _trained(run: Run) -> list[str]:
    """Each prompt set's rewards with their weights, and how they become one number."""
    parts = []
    for rewards_of_set in run.set_rewards:
        of_set = f"{rewards_of_set.name}: " if rewards_of_set.name else ""
        weights = rewards_of_set.weights.items()
        parts.append(of_set + " + ".join(f"{weight:g} {name}" for name, weight in weights))
    function = describe(run.options.train.aggregate_fn)
    if function is not None:
        parts[-1] += f" ({function['name'] if isinstance(function, dict) else function})"
    return parts


def _servers(rewards: Iterable[Reward]) -> list[str]:
    """A line for each judge or reward service, with the rewards that ask it."""
    names: dict[str, list[str]] = {}  # by address
    for reward in rewards:
        parts = reward.of_sets.values() if isinstance(reward, RewardBySet) else [reward]
        for part in parts:
            if not isinstance(part, CheckedReward):
                continue
            address = part.kwargs.get("server")
            if isinstance(part.function, ServerReward):
                address = part.function.client.base_url
            if address and reward.name not in names.setdefault(address, []):
                names[address].append(reward.name)
    return [f"asked at {address}: {', '.join(asking)}" for address, asking in names.items()]
