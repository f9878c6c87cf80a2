"""Finding rewards by name or import path.

A reward is a factory ``(**kwargs) -> callable(images, items) -> scores (n,)``, a missing score is NaN. A factory that
has a parameter ``device`` is given the process's device. A callable may have a method ``check()`` that is asked once
before anything expensive (a server that must answer, weights that must be there). A factory may have an attribute
``check_item``, a function (item, kwargs of the factory) that raises ValueError for an item that can have no score: every
item of a prompt set is shown to it before a model is loaded.

Any of them runs in another process when ``server`` is among its arguments (``REMOTE_ARGUMENTS``): the factory is then
called there, by ``paco_grpo.rewards.service``, and not here.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paco_grpo.rewards.errors import RewardError

# A service's environment has neither torch nor the rest of paco_grpo: nothing heavy is imported here.
if TYPE_CHECKING:
    import torch
    from PIL import Image

    from paco_grpo.types import Item

Reward = Callable[["Sequence[Image.Image]", "Sequence[Item]"], np.ndarray]

REWARDS: dict[str, str] = {
    "clipscore": "paco_grpo.rewards.clipscore:clipscore",
    "consistency_for_editing": "paco_grpo.rewards.editing:consistency_for_editing",
    "consistency_score": "paco_grpo.rewards.consistency:consistency_score",
    "edit_score": "paco_grpo.rewards.edit_score:edit_score",
    "grid_layout": "paco_grpo.rewards.grid_layout:grid_layout",
    "imagereward": "paco_grpo.rewards.imagereward:imagereward",
    "jpeg_compressibility": "paco_grpo.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "paco_grpo.rewards.jpeg:jpeg_incompressibility",
    "ocr": "paco_grpo.rewards.ocr:ocr",
    "pickscore": "paco_grpo.rewards.pickscore_scores:pickscore",
    "subfig_clipI": "paco_grpo.rewards.subfig_clipI:subfig_clipI",
    "subfig_clipT": "paco_grpo.rewards.subfig_clipT:subfig_clipT",
    "subfig_dreamsim": "paco_grpo.rewards.subfig_dreamsim:subfig_dreamsim",
}
REMOTE_ARGUMENTS = ("server", "api_key", "deadline_s", "request_size")


def short_name(name: str) -> str:
    """The name of a reward in metrics and aggregation: the factory's own name for an import path."""
    return name.rsplit(":", 1)[-1]


def reward_weights(reward_fn: Mapping[str, float]) -> dict[str, float]:
    """Weights by short name.

    Raises:
        RewardError: Two rewards have the same short name.
    """
    weights: dict[str, float] = {}
    for name, weight in reward_fn.items():
        if short_name(name) in weights:
            raise RewardError(f"two rewards are called {short_name(name)!r}; give one factory another name")
        weights[short_name(name)] = float(weight)
    return weights


def build_rewards(
    reward_fn: Mapping[str, float],
    reward_fn_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Reward]:
    """Build every reward of a configuration.

    Args:
        reward_fn: Reward name or ``package.module:factory`` → weight.
        reward_fn_kwargs: Keyword arguments of the factories, by the same names.
        device: For factories that take one.

    Returns:
        Short name → callable(images, items) returning (n,) float64, NaN = missing.

    Raises:
        RewardError: Unknown name or keyword (the nearest right one is named), or a factory that cannot be imported.
    """
    kwargs = dict(reward_fn_kwargs or {})
    for name in kwargs:
        if name not in reward_fn:
            raise RewardError(
                f"reward_fn_kwargs has {name!r}, which is not among the rewards ({', '.join(reward_fn)})"
                + _nearest(name, reward_fn)
            )
    reward_weights(reward_fn)
    return {
        short_name(name): _Checked(short_name(name), _build(name, kwargs.get(name, {}), device), _item_check(name, kwargs))
        for name in reward_fn
    }


def _item_check(name: str, kwargs: Mapping[str, Mapping[str, Any]]) -> Callable[[Item], None]:
    check = getattr(find_factory(name), "check_item", None)
    return (lambda item: None) if check is None else (lambda item: check(item, kwargs.get(name, {})))


def find_factory(name: str) -> Callable[..., Reward]:
    """The factory called ``name`` (registered, or ``package.module:factory``).

    Raises:
        RewardError: There is none.
    """
    target = REWARDS.get(name, name)
    if ":" not in target:
        raise RewardError(
            f"unknown reward {name!r}.{_nearest(name, REWARDS)} Known: {', '.join(sorted(REWARDS))}; "
            "or give your own as package.module:factory"
        )
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(f"reward {name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise RewardError(f"module {module_name} has no factory {attribute!r}.{_nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def _build(name: str, kwargs: Mapping[str, Any], device: torch.device | str) -> Reward:
    factory = find_factory(name)
    parameters = inspect.signature(factory).parameters
    if "server" in kwargs and "server" not in parameters:
        return _remote(name, kwargs, parameters)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for keyword in kwargs:
        if keyword not in parameters and not takes_any:
            raise RewardError(
                f"reward {name!r} has no argument {keyword!r}.{_nearest(keyword, parameters)} "
                f"It takes: {', '.join(parameters) or 'nothing'}"
            )
    given = dict(kwargs)
    if "device" in parameters:
        given.setdefault("device", device)
    try:
        return factory(**given)
    except (ValueError, TypeError) as error:  # what a factory says of its arguments
        raise RewardError(f"reward {name!r} with {kwargs}: {error}; correct reward_fn_kwargs") from error
    except ImportError as error:
        raise RewardError(
            f"reward {name!r} needs a package that is not installed: {error}; install it, or run the reward in an "
            f"environment of its own (`bash scripts/reward_service.sh {name}`) and name that with server="
        ) from error


def _remote(name: str, kwargs: Mapping[str, Any], parameters: Mapping[str, Any]) -> Reward:
    for keyword in kwargs:
        if keyword in REMOTE_ARGUMENTS:
            continue
        if keyword in parameters:
            raise RewardError(
                f"reward {name!r} runs at server={kwargs['server']!r}, so its argument {keyword!r} belongs there: "
                f"start the service with --kwargs '{{\"{keyword}\": …}}'"
            )
        raise RewardError(
            f"reward {name!r} with server=… has no argument {keyword!r}.{_nearest(keyword, REMOTE_ARGUMENTS)} "
            f"It takes: {', '.join(REMOTE_ARGUMENTS)}"
        )
    from paco_grpo.rewards.remote import RemoteReward

    return RemoteReward(name, **kwargs)


def _nearest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


class _Checked:
    """A reward whose answers are checked: one score an image, no infinities."""

    def __init__(self, name: str, function: Reward, check_item: Callable[[Item], None]) -> None:
        if not callable(function):
            raise RewardError(f"the factory of reward {name!r} returned {type(function).__name__}, not a callable")
        self.name, self.function, self._check_item = name, function, check_item

    def check(self) -> None:
        """Ask the reward whether it can work, if it knows how to tell."""
        if hasattr(self.function, "check"):
            self.function.check()

    def check_items(self, items: Sequence[Item]) -> None:
        """Look for an item that can have no score.

        Raises:
            RewardError: There is one; the message names it.
        """
        for item in items:
            try:
                self._check_item(item)
            except ValueError as error:
                raise RewardError(
                    f"item {item.item_id} of the prompt set can have no score: {error}; take another reward, or leave the "
                    "item out"
                ) from error

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        scores = np.asarray(self.function(images, items), dtype=np.float64)
        if scores.shape != (len(images),):
            raise RewardError(f"reward {self.name!r} returned shape {scores.shape} for {len(images)} images")
        if np.isinf(scores).any():
            raise RewardError(f"reward {self.name!r} returned an infinite score; a missing score is NaN")
        return scores
