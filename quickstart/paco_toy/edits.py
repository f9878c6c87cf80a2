"""The editing task of the shapes world: one thing in a scene changes, everything else stays.

A *scene* is a 2x2 grid of four different shapes, each a character in a view. An instruction names one of them by its shape
and gives it another colour or style: "make the star blue".

`python -m paco_toy.edits --seed 0 --out quickstart/out/world/edits` writes a data set of the kind `geneval_image`:
{train,test}_metadata.jsonl and images/. Half of the test edits result in a held-out character.

The oracle reads two things from pixel statistics. *Followed*, 0 or 1: the changed panel is valid and shows its shape with the
new colour or style. *Kept*: the share of eight facts that stayed: character and view of the three other panels, and of the
changed one its view and its other attribute. The score of an edit is sqrt(followed · kept), as docs/method.md §1 joins the
judge's two answers. `oracle_edit` and the other factories are rewards for PaCo-GRPO (`paco_toy.edits:oracle_edit`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_toy.oracle import Scorer, read_grids
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTER_INDEX,
    CHARACTERS,
    KINDS,
    VIEW_INDEX,
    VIEWS,
    Character,
    View,
    assemble_grid,
    random_jitter,
    render_panel,
    split_characters,
    to_uint8,
    write_jsonl,
)

EDITABLE = ("colour", "style")  # attributes of a character
IMAGE_SIDE = 128  # pixels of a reference image


@dataclass(frozen=True)
class Edit:
    """A scene and the requested change."""

    characters: tuple[Character, ...]  # four, panels row-major, all of different shapes
    views: tuple[View, ...]  # four
    place: int  # of the panel that changes, 0 to 3
    attribute: str  # ``colour`` or ``style``
    value: str  # the attribute's new value

    @property
    def instruction(self) -> str:
        """The instruction to the editor."""
        return f"make the {self.characters[self.place].shape} {self.value}"

    @property
    def result(self) -> Character:
        """The changed panel's character after the edit."""
        return dataclasses.replace(self.characters[self.place], **{self.attribute: self.value})

    def edited(self) -> tuple[Character, ...]:
        """The four characters after the edit."""
        return tuple(self.result if i == self.place else c for i, c in enumerate(self.characters))

    def row(self) -> dict[str, Any]:
        """The edit as fields of a metadata row; ``read_edit`` reads them."""
        scene = [[str(c), str(v)] for c, v in zip(self.characters, self.views, strict=True)]
        return {"scene": scene, "place": self.place, "attribute": self.attribute, "value": self.value}


def read_edit(row: Mapping[str, Any]) -> Edit:
    """The edit of a metadata row."""
    characters = tuple(Character(*words.split()) for words, _ in row["scene"])
    views = tuple(View(*words.split()) for _, words in row["scene"])
    return Edit(characters, views, row["place"], row["attribute"], row["value"])


def random_edit(rng: np.random.Generator, known: Sequence[int], results: Sequence[int]) -> Edit:
    """An edit of a scene of characters in ``known`` (indices into CHARACTERS) that results in one of ``results``."""
    pool = [CHARACTERS[i] for i in known]
    before: list[Character] = []
    while not before:  # some results are reachable only from characters that are not known
        result, attribute = CHARACTERS[rng.choice(results)], str(rng.choice(EDITABLE))
        value = getattr(result, attribute)
        others = [dataclasses.replace(result, **{attribute: v}) for v in ATTRIBUTES[attribute] if v != value]
        before = [c for c in others if CHARACTER_INDEX[c] in known]
    characters = [before[rng.integers(len(before))]]
    while len(characters) < 4:
        candidate = pool[rng.integers(len(pool))]
        if candidate.shape not in {c.shape for c in characters}:
            characters.append(candidate)
    order = rng.permutation(4)
    views = tuple(VIEWS[v] for v in rng.integers(len(VIEWS), size=4))
    return Edit(tuple(characters[i] for i in order), views, int(np.argmin(order)), attribute, value)


def draw_scene(
    characters: Sequence[Character], views: Sequence[View], side: int, jitters: Sequence[tuple[float, float]]
) -> Image.Image:
    """The image, ``side`` pixels square, of four panels; jitters are shifts as for ``render_panel``."""
    panels = [render_panel(c, v, side // 2, j) for c, v, j in zip(characters, views, jitters, strict=True)]
    return Image.fromarray(to_uint8(assemble_grid(panels)))


def build_edits(out: Path, seed: int, train: int = 1000, test: int = 256) -> None:
    """Write the data set; every second test edit results in a held-out character."""
    known, held_out = split_characters()
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng([seed, 40 + number])
        rows = []
        for i in range(count):
            is_held_out = split == "test" and i % 2 == 1
            edit = random_edit(rng, known, held_out if is_held_out else known)
            name = f"images/{split}_{i:04d}.png"
            jitters = [random_jitter(rng) for _ in range(4)]
            draw_scene(edit.characters, edit.views, IMAGE_SIDE, jitters).save(out / name, compress_level=1)
            row = {"idx": f"{split}-{i:04d}", "prompt": edit.instruction, "image": name}
            row |= {"category": KINDS[is_held_out], "task_name": edit.attribute}
            rows.append(row | edit.row())
        write_jsonl(out / f"{split}_metadata.jsonl", rows)


def judge_edits(images: Sequence[Image.Image], edits: Sequence[Edit]) -> tuple[np.ndarray, np.ndarray]:
    """Followed and kept, float64 (B,) in [0, 1] each, of 2x2 grids."""
    reading, followed, kept = read_grids(images), np.zeros(len(edits)), np.zeros(len(edits))
    for b, edit in enumerate(edits):
        for panel in np.flatnonzero(reading.valid[b]):
            shown = CHARACTERS[reading.character[b, panel]]
            same_view = reading.view[b, panel] == VIEW_INDEX[edit.views[panel]]
            same = shown == edit.characters[panel]
            if panel == edit.place:
                (other,) = set(EDITABLE) - {edit.attribute}
                same = getattr(shown, other) == getattr(edit.result, other)
                followed[b] = shown.shape == edit.result.shape and getattr(shown, edit.attribute) == edit.value
            kept[b] += (int(same_view) + int(same)) / 8
    return followed, kept


def _scores(images: Sequence[Image.Image], items: Sequence) -> tuple[np.ndarray, np.ndarray]:
    return judge_edits(images, [read_edit(item.metadata) for item in items])


def oracle_followed() -> Scorer:
    """Reward factory: was the instruction followed, float64 (B,), 0 or 1."""
    return lambda images, items: _scores(images, items)[0]


def oracle_kept() -> Scorer:
    """Reward factory: share of the rest that stayed, float64 (B,)."""
    return lambda images, items: _scores(images, items)[1]


def oracle_edit() -> Scorer:
    """Reward factory: sqrt(followed · kept), float64 (B,)."""
    return lambda images, items: np.sqrt(np.prod(_scores(images, items), axis=0))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    build_edits(arguments.out, arguments.seed)
    print(f"edits written to {arguments.out}")


if __name__ == "__main__":
    main()
