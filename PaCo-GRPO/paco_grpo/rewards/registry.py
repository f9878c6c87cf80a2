"""Finding rewards by name or import path.

``contract`` says what a reward is. With ``server`` among its arguments, its factory is called in
another process (``remote``), and not here.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np  # and no torch: the environment of a service need not have it
from PIL import Image
from typing_extensions import override

from paco_grpo.item import Item
from paco_grpo.names import find_function, source_of, without_keys
from paco_grpo.rewards.contract import Factory, Reward, RewardRun, ScoreFn
from paco_judge.errors import UserError
from paco_judge.files import write_json
from paco_judge.identity import identity, joined

logger = logging.getLogger(__name__)

REWARDS: dict[str, str] = {
    "between_images": "paco_grpo.rewards.judge:BetweenImages",
    "clipscore": "paco_grpo.rewards.clip:ClipScore",
    "consistency_for_editing": "paco_grpo.rewards.judge:ConsistencyForEditing",
    "consistency_score": "paco_grpo.rewards.judge:ConsistencyScore",
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
    "votes": "paco_grpo.rewards.people:votes",
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
    records: dict[str, Any] = {}
    for name, reward in rewards.items():
        if reward.record:
            records[name] = {**reward.record, "weights": reward.weights()}
    if records:
        write_json(folder / "questions.json", without_keys(records))


def find_factory(name: str) -> Factory:
    """The factory of a registered name, ``package.module:factory`` or ``file.py:factory``.

    Raises UserError: There is none.
    """
    try:
        return find_function(REWARDS.get(name, name), list(REWARDS))
    except ValueError as error:
        raise UserError(f"reward {error}") from error


def _remote_factory(name: str) -> Factory:
    return functools.partial(find_factory(_REMOTE), name)


def _parameters(name: str, factory: Factory) -> list[str]:
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


class CheckedReward(Reward):
    """A score function as a reward: errors name it, and scores are checked.

    Attributes:
        function: Of the user.
        asks_for: Which of ``epoch`` and ``seeds`` it is given.
    """

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
        self._check_item = _item_check(factory, kwargs)
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
            self.function: ScoreFn = factory(**arguments)
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
        self.asks_for = _asks_for(self.function, name)
        self._where: Sequence[str] = self._attribute("where", ())
        self._places = _places(inspect.signature(factory), arguments, self._where)
        self.record: Mapping[str, Any] | None = self._attribute("record")
        self.compares_images: bool = self._attribute("compares_images", False)
        self.parallel_calls: int = self._attribute("parallel_calls", 1)
        self.asks_people: bool = self._attribute("show") is not None
        self._remark: Callable[[Item], str | None] | None = self._attribute("remark", remark)
        self._begun = False
        self._closed = False

    def _attribute(self, name: str, default: Any = None) -> Any:
        return getattr(self.function, name, default)

    @property
    def needs_run(self) -> bool:
        """Whether it asks for what only a run has: seeds, epochs, a beginning."""
        return bool(self.asks_for) or self._attribute("begin") is not None

    @override
    def applies_to(self, item: Item) -> bool:
        return True  # ``RewardBySet`` is for prompt sets that differ

    @override
    def weights(self) -> str | None:
        identify = self._attribute("weights") or self._attribute("identity")
        if identify is not None:
            return identify()
        return joined([self._code(), *map(identity, self._places.values())])

    def _code(self) -> str | None:
        """The identity of the reward's own code: ours counts by its name."""
        module, _, name = self._place.rpartition(":")
        if module.startswith("paco_grpo."):
            return f"{module}:{name}"
        source = source_of(self._place)
        return identity(source) if source else f"{module}:{name}"

    @override
    def identity(self) -> dict[str, Any]:
        left_out = {*self._where, *self._places}
        arguments = {}
        for name, value in self.kwargs.items():
            if name not in left_out:
                arguments[name] = value
        public = without_keys({"arguments": arguments, "record": self.record})
        return public | {"weights": self.weights()}

    def check(self) -> None:
        """Whether what scores is there. Raises UserError: It is not."""
        self._call("check")

    def _call(self, name: str, *arguments: Any) -> None:
        """Call this attribute of the function, if it has it. Raises UserError."""
        attribute = self._attribute(name)
        if attribute is None:
            return
        try:
            attribute(*arguments)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise UserError(
                f"reward {self.name!r} cannot be used: {error}; see {self._options}"
            ) from error

    def check_items(self, items: Sequence[Item]) -> None:
        """Raise a UserError for an item that cannot be scored."""
        if self._check_item is None:
            return
        problems = []
        for item in items:
            try:
                with self._naming(item):
                    self._check_item(item)
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
    def _naming(self, item: Item) -> Generator[None]:
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
        self._call("prove", items)

    @override
    def begin(self, run: RewardRun) -> None:
        if not self._begun:
            self._begun = True
            self._call("begin", run)

    @override
    def close(self) -> None:
        close = self._attribute("close")
        if self._closed or close is None:
            return
        self._closed = True
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the run is over, and its result is saved
            logger.warning("%s was not closed: %s", self.name, error)

    @override
    def show(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> None:
        self._attribute("show")(images, items, **self._asked(seeds, epoch))

    @override
    def is_waiting(self) -> bool:
        return self._attribute("is_waiting")()

    @override
    def follow(self, phase: str, done: int, total: int) -> None:
        follow = self._attribute("follow")
        if follow is not None:
            follow(phase, done, total)

    def _asked(self, seeds: Sequence[int] | None, epoch: int | None) -> dict[str, Any]:
        """Those of them that the function asks for."""
        known = {"seeds": seeds, "epoch": epoch}
        return {name: known[name] for name in self.asks_for}

    @override
    def __call__(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> np.ndarray:
        asked = self._asked(seeds, epoch)
        scores = np.asarray(self.function(images, items, **asked), dtype=np.float64)
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


def _item_check(factory: Factory, kwargs: Mapping[str, Any]) -> Callable[[Item], object] | None:
    """The ``check_item`` of a factory; None: it has none."""
    check_item: Callable[..., object] | None = getattr(factory, "check_item", None)
    if check_item is None:
        return None
    try:
        inspect.signature(check_item).bind("item", "arguments")
    except TypeError:
        return check_item
    except ValueError:  # Python does not know the arguments of a compiled function
        pass
    return lambda item: check_item(item, kwargs)


def _asks_for(function: ScoreFn, name: str) -> list[str]:
    """Which of ``seeds`` and ``epoch`` it takes. Raises UserError: It takes no images and items.

    Checked at the start, because it is called only after an epoch's sampling.
    """
    try:
        signature = inspect.signature(function)
        asked = [parameter for parameter in ("seeds", "epoch") if parameter in signature.parameters]
        signature.bind("images", "items", **dict.fromkeys(asked))
    except TypeError as error:
        raise UserError(
            f"reward {name!r} must return a function of images and items "
            f"(docs/recipes.md#a-reward), but returns {function!r}: {error}"
        ) from error
    except ValueError:  # Python does not know the arguments of a compiled function
        return []
    return asked
