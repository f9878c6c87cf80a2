"""An entry of a prompt set. No torch here: the environment of a reward service need not have it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image


class _Lazy:
    """A field whose value, or each entry of a tuple, may be a function without arguments, called on every access.

    46,000 reference images do not fit in memory, and PIL keeps the pixels of an image once they are read.
    """

    def __init__(self, default: Any = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._default
        value = instance.__dict__[self._slot]
        return tuple(map(_read, value)) if isinstance(value, tuple) else _read(value)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._slot] = value


def _read(value: Any) -> Any:
    return value() if callable(value) else value


@dataclass(frozen=True)
class Item:
    """An image may be given as a function without arguments, called on every access: keep it while it is needed."""

    item_id: int  # position in its data set; groups are formed by it, never by text (two items may share a prompt)
    prompt: str
    height: int | None = None  # requested pixels, None = the configured resolution
    width: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the row it was read from
    image: Image.Image | None = _Lazy()  # type: ignore[assignment] # reference image of an editing item (RGB)
    more_images: tuple[Image.Image, ...] = _Lazy(())  # type: ignore[assignment] # further ones, in order

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """All reference images."""
        return () if self.num_images == 0 else (self.image, *self.more_images)

    @property
    def num_images(self) -> int:
        """How many reference images there are; none is read."""
        return 0 if self.__dict__["_image"] is None else 1 + len(self.__dict__["_more_images"])
