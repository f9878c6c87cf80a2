"""What a reward is: to those who write one, a ``ScoreFn``; to the trainer, a ``Reward``.

Users write a factory ``(**arguments) -> score(images, items) -> scores (n,)``. Images are PIL's,
RGB; ``item.Item`` lists the fields of an item. NaN or None is a missing score. A factory with a
parameter ``device`` is given the process's device.

A score function with a parameter ``seeds`` is given the seed of each image's own noise. One with a
parameter ``epoch`` is given the number of the images' epoch, as in metrics.jsonl. In an evaluation
of a run, this is the last epoch that has trained the weights; outside of a training it is None.

A score function and its factory may also have attributes: see ``Attributes``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

import numpy as np  # and no torch: the environment of a service need not have it
from numpy.typing import ArrayLike
from PIL import Image

from paco_grpo.item import Item

# (images, items), and epoch or seeds where it has such parameters, → a number for each image
ScoreFn = Callable[..., ArrayLike]
Factory = Callable[..., ScoreFn]  # its arguments are ``reward_fn_kwargs``
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., object])


class FromMain(Protocol):
    """The type of ``RewardRun.from_main``."""

    def __call__(self, value: Value, /) -> Value: ...


@dataclass(frozen=True)
class RewardRun:
    """The training, evaluation or generation that a reward scores for, seen by one process."""

    folder: Path  # its output; all processes have the same
    process: int  # number of this process; the main one is 0
    processes: int
    # value → the main process's value, on every process, such as a random token or a path. It can
    # be pickled. This is a collective operation: ``begin`` calls it equally often on every process.
    from_main: FromMain
    resumes: bool = False  # an earlier run in the folder, from a checkpoint or its beginning


class Attributes(TypedDict, total=False):
    """What a score function may have besides (images, items) → scores, in the order of use."""

    # Of its factory. Raises ValueError for an item that cannot be scored. It may have a second
    # parameter, for the arguments of the factory.
    check_item: Callable[[Item], object] | Callable[[Item, Mapping[str, Any]], object]
    # Called once before anything expensive, and after ``check_item``: does the server answer? Are
    # the weights there?
    check: Callable[[], object]
    # What is unusual about an item that can be scored, such as "are longer than 77 tokens", or
    # None; the log says how many such prompts there are. A factory may have it, too.
    remark: Callable[[Item], str | None]
    # Called with the training and the test items, for one real question.
    prove: Callable[[Sequence[Item]], object]
    # For the run's questions.json.
    record: Mapping[str, Any]
    # The identity of what gives the scores (``paco_judge.identity``), None if it is not known.
    # Until 0.6, it was called ``weights``, and still may be.
    identity: Callable[[], str | None]
    # Names of the factory's arguments that only say where that is, such as a cache.
    where: Sequence[str]
    # How many threads may call it at the same time (default 1).
    parallel_calls: int
    # True: it gets all images of an item in one call, once an epoch's images are sampled.
    compares_images: bool
    # Of a reward that people give, which compares images: it takes the function's arguments, and
    # shows them all images of an item. The process that owns the item calls it, and calls the
    # function once nobody is waited for: neither waits for people itself.
    show: Callable[..., object]
    # Whether people still have to answer; asked twice a second by every process, after all of them
    # have shown their images.
    is_waiting: Callable[[], bool]
    # Told what the training does: a phase (sampling, training or evaluation), and how many of its
    # images are done, of how many (0 and 0: unknown).
    follow: Callable[[str, int, int], object]
    # Called once by each process when the run begins.
    begin: Callable[[RewardRun], object]
    # Called once by each process at the end of a run that has begun, also of one that an error or a
    # signal ends; a call for scores may still be running then.
    close: Callable[[], object]


def with_attributes(function: Function, **attributes: Unpack[Attributes]) -> Function:
    """The same score function or factory; now it has the attributes."""
    function.__dict__.update(attributes)
    return function


class Reward(ABC):
    """A reward that has been checked, as training and evaluations use it.

    Attributes:
        name: In metrics and aggregation.
        record, parallel_calls, compares_images: As in ``Attributes``.
        asks_people: It has ``show``. A score that a person does not give is absent, not missing.
    """

    name: str
    record: Mapping[str, Any] | None
    parallel_calls: int
    compares_images: bool
    asks_people: bool

    @abstractmethod
    def applies_to(self, item: Item) -> bool:
        """Whether the item's prompt set has this reward."""

    @abstractmethod
    def weights(self) -> str | None:
        """The identity of what gives the scores (``paco_judge.identity``); None: unknown."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Whose number a score is: all that it depends on besides images and items, as JSON."""

    @abstractmethod
    def begin(self, run: RewardRun) -> None:
        """Let the reward prepare itself for ``run``, at the first call. Raises UserError.

        All processes call it for the same rewards in the same order (``RewardRun.from_main``).
        """

    @abstractmethod
    def show(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Show people all images of an item; the arguments are those of a call."""

    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether people still have to answer about images that were shown."""

    @abstractmethod
    def follow(self, phase: str, done: int, total: int) -> None:
        """Say what the training does, as in ``Attributes``."""

    @abstractmethod
    def close(self) -> None:
        """End what the reward began, at the first call; an error is logged."""

    @abstractmethod
    def __call__(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> np.ndarray:
        """Scores (n,) float64, NaN = missing.

        Args:
            images, items: n of each.
            seeds: Of each image's own noise.
            epoch: That the images are of; None outside of a training.

        Raises:
            UserError: They are not one for each image, or infinite.
        """
