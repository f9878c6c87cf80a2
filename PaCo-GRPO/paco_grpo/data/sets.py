"""The prompt sets of a run: their items, their rewards, their parts of an epoch.

A run without ``config.datasets`` has one, without a name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paco_grpo.data.prompts import KINDS, find_kind, load_prompts
from paco_grpo.names import source_of
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.types import Item
from paco_judge.errors import UserError
from paco_judge.files import hash_value
from paco_judge.identity import fingerprint, joined


@dataclass(frozen=True)
class RewardTable:
    """The rewards of one split of a prompt set, by the names that the options give them."""

    weights: Mapping[str, float]
    kwargs: Mapping[str, Mapping[str, Any]]  # of every name in ``weights``


@dataclass(frozen=True)
class PromptSet:
    """A prompt set as the options describe it."""

    name: str  # "" without ``config.datasets``
    folder: str
    kind: str
    is_open: bool | None  # of the prompts that it takes from its folder; None: it takes all
    share: float
    train: RewardTable
    test: RewardTable

    @property
    def option(self) -> str:
        """The option that names its folder, after ``config.``."""
        return f"datasets.{self.name}.folder" if self.name else "dataset"

    @property
    def metrics(self) -> str:
        """What the names of its evaluation's metrics begin with."""
        return f"set/{self.name}/" if self.name else "eval/"

    def table(self, split: str) -> RewardTable:
        """Its rewards in training (``train``) or in evaluations (``test``)."""
        return self.train if split == "train" else self.test

    def load(self, split: str) -> list[Item]:
        """Its items, with their numbers in its folder. Raises UserError."""
        items = load_prompts(self.folder, split, self.kind, self.option)
        if self.is_open is not None:
            items = [item for item in items if bool(item.metadata.get("open")) == self.is_open]
        if not items:
            raise UserError(
                f"config.datasets.{self.name}.open={self.is_open} leaves no item of the {split} "
                f"split of {self.folder}"
            )
        return items


def prompt_sets(options: RunOptions) -> list[PromptSet]:
    """The prompt sets of a run in order of their names."""
    train = options.train
    test = options.test
    train_kwargs = train.reward_fn_kwargs
    test_kwargs = train_kwargs | test.reward_fn_kwargs
    if not options.datasets:
        return [
            PromptSet(
                name="",
                folder=options.dataset,
                kind=options.prompt_fn,
                is_open=None,
                share=1.0,
                train=_table(train.reward_fn, train_kwargs),
                test=_table(test.reward_fn or train.reward_fn, test_kwargs),
            )
        ]
    sets = []
    for name, set_options in sorted(options.datasets.items()):
        trained = set_options.reward_fn or train.reward_fn
        tested = set_options.test_reward_fn or test.reward_fn or trained
        prompt_set = PromptSet(
            name=name,
            folder=set_options.folder,
            kind=set_options.prompt_fn or options.prompt_fn,
            is_open=set_options.open,
            share=set_options.share,
            train=_table(trained, train_kwargs | set_options.reward_fn_kwargs),
            test=_table(tested, test_kwargs | set_options.reward_fn_kwargs),
        )
        sets.append(prompt_set)
    return sets


def reward_arguments(options: RunOptions, name: str) -> dict[str, Any]:
    """The arguments of a reward outside of its prompt set.

    Those of training; of the evaluation where it is not trained on. Raises ConfigError: Two prompt
    sets give it others.
    """
    sets = prompt_sets(options)
    for split in ("train", "test"):
        tables = [prompt_set.table(split) for prompt_set in sets]
        arguments = [table.kwargs[name] for table in tables if name in table.kwargs]
        if any(other != arguments[0] for other in arguments):
            raise ConfigError(f"config.datasets have different reward_fn_kwargs of {name}")
        if arguments:
            return dict(arguments[0])
    of_run = options.train.reward_fn_kwargs | options.test.reward_fn_kwargs
    return dict(of_run.get(name, {}))


def has_references(options: RunOptions) -> bool:
    """Whether prompt sets are of a kind with reference images.

    A function of your own says so with an attribute ``has_references``.
    """
    kinds = {prompt_set.kind for prompt_set in prompt_sets(options)}
    if not kinds.isdisjoint(("geneval_image", "arrow_editing")):
        return True
    return any(getattr(find_kind(kind), "has_references", False) for kind in kinds)


def _table(weights: Mapping[str, float], kwargs: Mapping[str, Mapping[str, Any]]) -> RewardTable:
    return RewardTable(weights, {name: kwargs.get(name, {}) for name in weights})


def join(items_of_sets: Sequence[Sequence[Item]]) -> list[Item]:
    """The items of all prompt sets, numbered in this order, each with the number of its set."""
    joined: list[Item] = []
    for number, items in enumerate(items_of_sets):
        for item in items:
            joined.append(dataclasses.replace(item, item_id=len(joined), dataset=number))
    return joined


def items_in_turn(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` items: one of each prompt set in turn, in order, and again from its start."""
    by_number: dict[int, list[Item]] = {}
    for item in items:
        by_number.setdefault(item.dataset, []).append(item)
    items_of_sets = list(by_number.values())
    chosen = []
    for index in range(count):
        turn, number = divmod(index, len(items_of_sets))
        items_of_set = items_of_sets[number]
        chosen.append(items_of_set[turn % len(items_of_set)])
    return chosen


def load_items(sets: Sequence[PromptSet], split: str) -> list[Item]:
    """The items of all prompt sets of a run. Raises UserError."""
    return join([prompt_set.load(split) for prompt_set in sets])


def fingerprint_sets(sets: Sequence[PromptSet]) -> str | None:
    """One for the items of all prompt sets of a run; None: the only set is not here."""
    if not sets[0].name:
        return _fingerprint(sets[0])
    contents = []
    for prompt_set in sets:
        files = _fingerprint(prompt_set)
        contents.append((prompt_set.name, prompt_set.kind, prompt_set.is_open, files))
    return hash_value(contents)


def _fingerprint(prompt_set: PromptSet) -> str | None:
    """Of the files of a prompt set, and of the code that reads them if it is your own."""
    files = fingerprint(prompt_set.folder)
    if prompt_set.kind in KINDS:
        return files
    source = source_of(prompt_set.kind)
    name = prompt_set.kind.rpartition(":")[2]
    code = fingerprint(source) if source else None
    return joined([files, None if code is None else f"{name}@{code}"])


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """``total`` divided in proportion to ``shares`` (Sainte-Laguë).

    Parts never shrink as the total grows.
    """
    counts = [0] * len(shares)
    for _ in range(total):
        claims = [share / (2 * count + 1) for share, count in zip(shares, counts, strict=True)]
        counts[claims.index(max(claims))] += 1
    return counts
