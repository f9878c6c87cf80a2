"""Finding rewards by name or import path.

A reward is a factory ``(**kwargs) -> callable(images, items) -> scores (n,)``. Images are PIL's,
RGB; ``item.Item`` lists the fields of an item. NaN or None is a missing score. A factory with a
parameter ``device`` is given the process's device. The factory may have an attribute
``check_item``, a function (item, kwargs of the factory) that raises ValueError for an item that
cannot be scored. The callable may have

- ``check()``: called once before anything expensive, and after ``check_item`` (does the server
  answer? are the weights there?),
- ``prove(items)``: called after it with the training and the test items, for one real question,
- ``remark(item)``: what is unusual about an item that can be scored, such as "are longer than 77
  tokens", or None; the log says how many such prompts there are. A factory may have it, too,
- ``record``: a dictionary for the run's ``questions.json``,
- ``weights()``: the identity of what gives the scores (``paco_judge.identity``), None if it is not
  known; ``where``: the names of arguments that only say where that is, such as a cache,
- ``parallel_calls``: how many threads may call it at the same time (default 1),
- ``compares_images = True``: it gets all images of an item in one call, once an epoch's images are
  sampled.

With ``server`` among its arguments, a reward's factory is called in another process (``remote``),
and not here.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np  # and no torch: the environment of a service need not have it
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.names import find_function, without_keys
from paco_judge.errors import UserError
from paco_judge.files import write_json
from paco_judge.identity import identity, joined

logger = logging.getLogger(__name__)

Reward = Callable[[Sequence[Image.Image], Sequence[Item]], np.ndarray]

REWARDS: dict[str, str] = {
    "between_images": "paco_grpo.rewards.judge:BetweenImages",
    "clipscore": "paco_grpo.rewards.clip:ClipScore",
    "consistency_for_editing": "paco_grpo.rewards.judge:ConsistencyForEditing",
    "consistency_score": "paco_grpo.rewards.server:ConsistencyScore",
    "edit_reward": "paco_grpo.rewards.preference:edit_reward",
    "edit_score": "paco_grpo.rewards.edit_score:EditScore",
    "face_likeness": "paco_grpo.rewards.identity:face_likeness",
    "geneval2": "paco_grpo.rewards.questions:GenEval2",
    "grid_layout": "paco_grpo.rewards.judge:GridLayout",
    "hpsv3": "paco_grpo.rewards.preference:hpsv3",
    "imagereward": "paco_grpo.rewards.preference:imagereward",
    "jpeg_compressibility": "paco_grpo.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "paco_grpo.rewards.jpeg:jpeg_incompressibility",
    "kept_pixels": "paco_grpo.rewards.identity:kept_pixels",
    "ocr": "paco_grpo.rewards.ocr:ocr",
    "pickscore": "paco_grpo.rewards.clip:PickScore",
    "reference_clipI": "paco_grpo.rewards.clip:reference_clipI",
    "subfig_clipI": "paco_grpo.rewards.clip:subfig_clipI",
    "subfig_clipT": "paco_grpo.rewards.clip:subfig_clipT",
    "subfig_dreamsim": "paco_grpo.rewards.subfigures:subfig_dreamsim",
    "unified_reward": "paco_grpo.rewards.questions:UnifiedReward",
    "win_rate": "paco_grpo.rewards.judge:WinRate",
}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf"}
_REMOTE = "paco_grpo.rewards.remote.client:RemoteReward"


def short_name(name: str) -> str:
    """The name of a reward in metrics and aggregation: of an import path, the last part."""
    return name.rsplit(":", 1)[-1]


def reward_weights(reward_fn: Mapping[str, float]) -> dict[str, float]:
    """Weights by short name. Raises UserError: Two rewards have the same one."""
    weights: dict[str, float] = {}
    for name, weight in reward_fn.items():
        if short_name(name) in weights:
            raise UserError(
                f"two rewards are called {short_name(name)!r}; give one factory another name"
            )
        weights[short_name(name)] = float(weight)
    return weights


def watched_rewards(tables: Sequence[Mapping[str, float]]) -> list[str]:
    """Short names of the rewards that have no weight in any of the ``reward_fn``."""
    largest: dict[str, float] = {}
    for reward_fn in tables:
        for name, weight in reward_fn.items():
            largest[name] = max(abs(weight), largest.get(name, 0.0))
    return [short_name(name) for name, weight in largest.items() if weight == 0]


def build_rewards(
    reward_fn: Mapping[str, float],
    reward_fn_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    device: Any = "cpu",
    built: dict[str, "CheckedReward"] | None = None,
) -> dict[str, "CheckedReward"]:
    """The rewards of a configuration, by short name. Raises UserError.

    Args:
        reward_fn: Reward name or ``package.module:factory`` → weight.
        reward_fn_kwargs: Keyword arguments of the factories, by the same names.
        device: For factories that take one.
        built: Of earlier calls: what is in it is not built again, and the others are added.
    """
    reward_fn_kwargs = reward_fn_kwargs or {}
    built = {} if built is None else built
    reward_weights(reward_fn)  # no two of one name
    rewards = {}
    for name in reward_fn:
        kwargs = reward_fn_kwargs.get(name, {})
        identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
        if identity not in built:
            built[identity] = CheckedReward(name, kwargs, device)
        rewards[short_name(name)] = built[identity]
    return rewards


def find_problems(rewards: Iterable["CheckedReward"], items: Sequence[Item]) -> list[str]:
    """Check rewards, and whether each can score ``items``. Returns a text for each problem."""
    problems = []
    for reward in rewards:
        try:
            reward.check_items(items)
            reward.check()
            reward.prove(items)
        except UserError as error:
            problems.append(str(error))
    return problems


def write_records(rewards: Mapping[str, Reward], folder: Path) -> None:
    """Write the rewards' records to ``questions.json``, if there are any, and who is asked."""
    records = {}
    for name, reward in rewards.items():
        if reward.record:
            records[name] = reward.record | {"weights": reward.weights()}
    if records:
        write_json(folder / "questions.json", without_keys(records))


def find_factory(name: str) -> Callable[..., Reward]:
    """The factory of a registered name, ``package.module:factory`` or ``file.py:factory``.

    Raises UserError: There is none.
    """
    try:
        return find_function(REWARDS.get(name, name), list(REWARDS))
    except ValueError as error:
        raise UserError(f"reward {error}") from error


def _remote_factory(name: str) -> Callable[..., Reward]:
    return functools.partial(find_factory(_REMOTE), name)


def _parameters(name: str, factory: Callable[..., Reward]) -> list[str]:
    """The names of a factory's arguments. Raises UserError: Python knows none of it."""
    try:
        return list(inspect.signature(factory).parameters)
    except ValueError as error:
        raise UserError(f"reward {name!r} is no factory of rewards: {error}") from error


def _places(
    signature: inspect.Signature, arguments: Mapping[str, Any], where: Sequence[str]
) -> dict[str, str]:
    """The arguments, also those left at their defaults, that name weights: files, folders, models.

    Not those in ``where``, such as a folder to which weights are still to be downloaded.
    """
    bound = signature.bind(**arguments)
    bound.apply_defaults()
    places = {}
    for name, value in bound.arguments.items():
        if not isinstance(value, str) or not value or name in where:
            continue
        # os.path, because a text that is no path, such as a long question, is no error there.
        place = os.path.expanduser(value)
        is_here = os.path.exists(place)
        files = os.listdir(place) if os.path.isdir(place) else [place]
        has_weights = is_here and any(Path(file).suffix in _WEIGHTS for file in files)
        is_hub_name = not is_here and re.fullmatch(r"[\w.-]+/[\w.-]+", value)
        if has_weights or is_hub_name:
            places[name] = value
    return places


class CheckedReward:
    """A reward whose errors name it, and whose scores are checked; see ``build_rewards``."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], device: Any) -> None:
        is_remote = "server" in kwargs
        try:
            factory = find_factory(name)
        except UserError:
            # What its module imports may be in the environment of the service alone.
            if not is_remote or ":" not in REWARDS.get(name, name):
                raise
            factory = _remote_factory(name)
        self.name = short_name(name)
        self.kwargs = kwargs
        self._place = REWARDS.get(name, name)
        self._check_item = getattr(factory, "check_item", None)
        remark = getattr(factory, "remark", None)
        if is_remote and "server" not in _parameters(name, factory):
            factory = _remote_factory(name)
        parameters = _parameters(name, factory)
        if parameters[:2] == ["images", "items"]:
            raise UserError(
                f"reward {name!r} takes images and items, but must be a factory, which returns "
                "such a function (docs/recipes.md#a-reward)"
            )
        arguments = dict(kwargs)
        if "device" in parameters:
            arguments.setdefault("device", device)
        often_needed = [name for name in ("api_key", "question") if name in parameters]
        hinted = dict.fromkeys([*parameters[:2], *often_needed])
        self._options = f"config.train.reward_fn_kwargs.{name}.{'|'.join(hinted)}"
        try:
            self.function = factory(**arguments)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise UserError(f"reward {name!r}: {error}; see {self._options}") from error
        except SystemExit as error:
            raise UserError(f"reward {name!r} ends the program: sys.exit({error})") from error
        except ImportError as error:
            raise UserError(
                f"reward {name!r} needs a package that is not installed: {error}; install it, or "
                "run the reward in a separate environment (`bash scripts/reward_service.sh "
                f"{name}`) and give its address as server="
            ) from error
        # Checked here, because it is called only after an epoch's sampling.
        try:
            inspect.signature(self.function).bind("images", "items")
        except TypeError as error:
            raise UserError(
                f"reward {name!r} must return a function of images and items "
                f"(docs/recipes.md#a-reward), but returns {self.function!r}: {error}"
            ) from error
        except ValueError:  # Python does not know the arguments of a compiled function
            pass
        self._where: Sequence[str] = getattr(self.function, "where", ())
        self._places = _places(inspect.signature(factory), arguments, self._where)
        self.record: dict[str, Any] | None = getattr(self.function, "record", None)
        self.compares_images: bool = getattr(self.function, "compares_images", False)
        self.parallel_calls: int = getattr(self.function, "parallel_calls", 1)
        self._remark = getattr(self.function, "remark", remark)

    def applies_to(self, item: Item) -> bool:
        """Whether the item's prompt set has this reward: always, unless sets differ (``by_set``)."""
        return True

    def weights(self) -> str | None:
        """The identity of what gives the scores (``paco_judge.identity``); None: unknown."""
        if hasattr(self.function, "weights"):
            return self.function.weights()
        return joined([self._code(), *map(identity, self._places.values())])

    def _code(self) -> str | None:
        """The identity of the reward's own code: ours counts by its name."""
        module, _, name = self._place.rpartition(":")
        if module.startswith("paco_grpo."):
            return f"{module}:{name}"
        is_file = module.lower().endswith(".py")
        source = module if is_file else importlib.util.find_spec(module).origin
        return identity(source) if source else f"{module}:{name}"

    def identity(self) -> dict[str, Any]:
        """What its scores depend on besides images and items; JSON can hold it."""
        left_out = {*self._where, *self._places}
        arguments = {}
        for name, value in self.kwargs.items():
            if name not in left_out:
                arguments[name] = value
        public = without_keys({"arguments": arguments, "record": self.record})
        return public | {"weights": self.weights()}

    def check(self) -> None:
        """The reward's own ``check``, if it has one. Raises UserError."""
        if not hasattr(self.function, "check"):
            return
        try:
            self.function.check()
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UserError:
        return UserError(f"reward {self.name!r} cannot be used: {error}; see {self._options}")

    def check_items(self, items: Sequence[Item]) -> None:
        """Raise a UserError for an item that cannot be scored."""
        if self._check_item is None:
            return
        problems = []
        for item in items:
            try:
                with self._naming(item):
                    self._check_item(item, self.kwargs)
            except UserError as error:
                problems.append(error)
        if problems and len(problems) < len(items):
            raise UserError(
                f"{problems[0]}. It cannot score {len(problems)} of {len(items)} prompts: put them "
                "into a prompt set with other rewards (config.datasets, docs/rewards.md)"
            ) from problems[0]
        if problems:
            raise problems[0]

    @contextlib.contextmanager
    def _naming(self, item: Item) -> Iterator[None]:
        """An error inside the block says that ``item`` cannot be scored."""
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:
            why = str(error)
            if isinstance(error, KeyError):
                why = f"it has no field {error}, which {self._place} needs"
            raise UserError(
                f"{item.place or f'the item {item.prompt!r}'} cannot be scored by {self.name!r}, a "
                f"reward of config.train.reward_fn or config.test.reward_fn: {why}"
            ) from error

    def prove(self, items: Sequence[Item]) -> None:
        """Log what is unusual about ``items``, and let a judge answer one real question.

        Raises UserError: It gives no score.
        """
        remarks: Counter[str | None] = Counter()
        if self._remark is not None:
            for item in items:
                with self._naming(item):
                    remarks[self._remark(item)] += 1
        del remarks[None]
        for remark, count in remarks.items():
            logger.warning("%s: %d of %d prompts %s", self.name, count, len(items), remark)
        if hasattr(self.function, "prove"):
            try:
                self.function.prove(items)
            except (ValueError, RuntimeError) as error:
                raise self._unusable(error) from error

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing; None is missing too.

        Raises UserError: They are not one for each image, or infinite.
        """
        scores = np.asarray(self.function(images, items), dtype=np.float64)
        if scores.shape != (len(images),):
            raise UserError(
                f"reward {self.name!r} returned shape {scores.shape} for {len(images)} images"
            )
        infinite = scores[np.isinf(scores)]
        if len(infinite):
            raise UserError(
                f"reward {self.name!r} returned {infinite[0]} for {len(infinite)} of {len(images)} "
                "images; a score is a finite number, or NaN where it is missing"
            )
        return scores
