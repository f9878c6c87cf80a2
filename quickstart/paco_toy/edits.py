"""The editing task of the shapes world: one thing in a scene changes, everything else stays.

A *scene* is a 2x2 grid of four different shapes, each a character in a view. An instruction names
one of them by its shape and gives it another colour or style: "make the star blue".

*Followed*, 0 or 1: the changed panel is valid and shows its shape with the new colour or style.
*Kept*: the share of eight facts that stayed. They are the character and the view of the three other
panels, and the view and the other attribute of the changed one. The score of an edit is
sqrt(followed · kept), as docs/method.md §1 joins the judge's two answers. The factories at the end
are rewards for PaCo-GRPO (`paco_toy.edits:oracle_edit`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_judge.files import write_json_lines
from paco_toy import world
from paco_toy.oracle import Scorer, read_grids

EDITABLE = ("colour", "style")  # attributes of a character
PANEL_SIDE = 64  # pixels of a panel of a reference image


@dataclass(frozen=True)
class Edit:
    """A scene and the requested change."""

    characters: tuple[world.Character, ...]  # four, panels row-major, all of different shapes
    views: tuple[world.View, ...]
    place: int  # of the panel that changes, 0 to 3
    attribute: str  # ``colour`` or ``style``
    value: str

    @property
    def instruction(self) -> str:
        """The prompt."""
        return f"make the {self.characters[self.place].shape} {self.value}"

    @property
    def result(self) -> world.Character:
        """The changed panel's character."""
        return dataclasses.replace(self.characters[self.place], **{self.attribute: self.value})

    def row(self) -> dict[str, Any]:
        """Fields of a metadata row, which ``read_edits`` reads."""
        scene = [[str(c), str(v)] for c, v in zip(self.characters, self.views, strict=True)]
        return {
            "scene": scene,
            "place": self.place,
            "attribute": self.attribute,
            "value": self.value,
        }


def read_edits(items: Sequence) -> list[Edit]:
    """The edits of items whose metadata rows ``Edit.row`` made."""
    edits = []
    for item in items:
        row = item.metadata
        characters = tuple(world.Character(*words.split()) for words, _ in row["scene"])
        views = tuple(world.View(*words.split()) for _, words in row["scene"])
        edits.append(Edit(characters, views, row["place"], row["attribute"], row["value"]))
    return edits


def _one_change_before(
    result: world.Character, attribute: str, known: Sequence[int]
) -> list[world.Character]:
    """The characters in ``known`` that become ``result`` when their attribute is changed."""
    candidates = []
    for value in world.ATTRIBUTES[attribute]:
        candidate = dataclasses.replace(result, **{attribute: value})
        if candidate != result and world.CHARACTER_INDEX[candidate] in known:
            candidates.append(candidate)
    return candidates


def random_edit(rng: np.random.Generator, known: Sequence[int], results: Sequence[int]) -> Edit:
    """An edit of a scene of characters in ``known`` that results in one of ``results``.

    Both are indices into CHARACTERS.
    """
    before: list[world.Character] = []
    while not before:
        # Some results are reachable only from characters that are not known.
        result = world.CHARACTERS[rng.choice(results)]
        attribute = str(rng.choice(EDITABLE))
        before = _one_change_before(result, attribute, known)
    characters = [before[rng.integers(len(before))]]
    while len(characters) < 4:
        candidate = world.CHARACTERS[known[rng.integers(len(known))]]
        if candidate.shape not in {c.shape for c in characters}:
            characters.append(candidate)
    order = rng.permutation(4)
    views = tuple(world.VIEWS[v] for v in rng.integers(len(world.VIEWS), size=4))
    return Edit(
        characters=tuple(characters[i] for i in order),
        views=views,
        place=int(np.argmin(order)),
        attribute=attribute,
        value=getattr(result, attribute),
    )


def build_edits(out: Path, seed: int, train: int = 1000, test: int = 256) -> None:
    """A data set of the kind ``geneval_image``.

    Every second test edit results in a held-out character.
    """
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng([seed, 40 + number])
        rows = []
        for i in range(count):
            is_held_out = split == "test" and i % 2 == 1
            edit = random_edit(rng, world.KNOWN, world.HELD_OUT if is_held_out else world.KNOWN)
            name = f"images/{split}_{i:04d}.png"
            scene = world.render_grid(edit.characters, edit.views, PANEL_SIDE, rng)
            world.to_image(scene).save(out / name, compress_level=1)
            row = {
                "idx": f"{split}-{i:04d}",
                "prompt": edit.instruction,
                "image": name,
                "category": world.KINDS[is_held_out],
                "task_name": edit.attribute,
            }
            rows.append(row | edit.row())
        write_json_lines(out / f"{split}_metadata.jsonl", rows)


def judge_edits(
    images: Sequence[Image.Image], edits: Sequence[Edit]
) -> tuple[np.ndarray, np.ndarray]:
    """Followed and kept of 2x2 grids, float64 (B,) each."""
    reading = read_grids(images)
    followed = np.zeros(len(edits))
    kept = np.zeros(len(edits))
    for b, edit in enumerate(edits):
        (other_attribute,) = set(EDITABLE) - {edit.attribute}
        for panel in np.flatnonzero(reading.valid[b]):
            shown = world.CHARACTERS[reading.character[b, panel]]
            if panel == edit.place:
                has_shape = shown.shape == edit.result.shape
                has_value = getattr(shown, edit.attribute) == edit.value
                followed[b] = has_shape and has_value
                same_identity = getattr(shown, other_attribute) == getattr(
                    edit.result, other_attribute
                )
            else:
                same_identity = shown == edit.characters[panel]
            same_view = reading.view[b, panel] == world.VIEW_INDEX[edit.views[panel]]
            kept[b] += (int(same_view) + int(same_identity)) / 8
    return followed, kept


def _scorer(measure: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Scorer:
    """A reward that is ``measure(followed, kept)``."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        followed, kept = judge_edits(images, read_edits(items))
        return measure(followed, kept)

    return score


def oracle_followed() -> Scorer:
    """Reward factory: whether the instruction was followed, 0 or 1."""
    return _scorer(lambda followed, kept: followed)


def oracle_kept() -> Scorer:
    """Reward factory: the share of facts that stayed."""
    return _scorer(lambda followed, kept: kept)


def oracle_edit() -> Scorer:
    """Reward factory: sqrt(followed · kept)."""
    return _scorer(lambda followed, kept: np.sqrt(followed * kept))


def _check_item(item: Any, arguments: Any) -> None:
    """Called for each prompt before a model is loaded. Raises ValueError."""
    if "scene" not in item.metadata:
        raise ValueError(
            "it has no field 'scene': this reward reads the edits of the quickstart, and no others; "
            "choose other rewards for your own (docs/rewards.md)"
        )
    read_edits([item])


for _factory in (oracle_followed, oracle_kept, oracle_edit):
    _factory.check_item = _check_item
