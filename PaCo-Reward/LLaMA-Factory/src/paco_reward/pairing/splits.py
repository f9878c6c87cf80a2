"""Which side of the split themes and images are on: later calls keep it (OUTPUT/split.json)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from scipy.cluster.hierarchy import DisjointSet

from paco_judge.errors import UserError
from paco_judge.files import read_json, write_json
from paco_reward.pairing.files import TEST, TRAIN
from paco_reward.pairing.inputs import PromptItem
from paco_reward.pairing.select import LabeledPair, order_key

SPLIT = "split.json"


@dataclass
class Split:
    """TRAIN or TEST, by theme and by the name of an image in the data set's folder."""

    themes: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    mended: dict[str, str] = field(default_factory=dict)  # images of --mend, split by itself

    @classmethod
    def read(cls, output: Path) -> Self:
        """What earlier calls decided in a folder."""
        file = output / SPLIT
        return cls(**read_json(file)) if file.exists() else cls()

    def write(self, output: Path) -> None:
        """Keep it for later calls."""
        write_json(output / SPLIT, asdict(self))

    def choose_themes(self, items: Sequence[PromptItem], share: float, seed: int) -> None:
        """Decide before there are labels: ``share`` of the themes, at least one of two, is TEST.

        The metadata's own choice comes first, then what is decided already.
        """
        themes = {item.theme: item.split or self.themes.get(item.theme) for item in items}
        is_needed = share > 0 and len(themes) > 1
        num_tested = max(1, round(share * len(themes))) if is_needed else 0
        num_left = num_tested - list(themes.values()).count(TEST)
        for theme in sorted(themes, key=lambda theme: order_key(seed, "split", theme)):
            if themes[theme] is None and num_left > 0:
                themes[theme] = TEST
                num_left -= 1
            self.themes[theme] = themes[theme] or TRAIN

    def without_crossing(
        self, pairs: Sequence[LabeledPair], leader: Mapping[str, str], counts: Counter
    ) -> list[LabeledPair]:
        """The pairs that link no image of TRAIN with one of TEST; order is kept.

        Args:
            pairs: All of them. Images of themes are in no part.
            leader: Of each image, see ``select.leaders``; near-duplicates are one image.
            counts: Gets the number of pairs that are left out.
        """
        images = DisjointSet(leader.values())
        parts: dict[str, str] = {}  # by the root of connected images
        for image, first in leader.items():
            part = self.images.get(image)
            if part and parts.get(first) != TRAIN:
                parts[first] = part
        kept = []
        for pair in pairs:
            roots = [images[leader[pair.first]], images[leader[pair.second]]]
            sides = {parts[root] for root in roots if root in parts}
            if len(sides) > 1:
                counts["across_the_split"] += 1
                continue
            kept.append(pair)
            images.merge(*roots)
            for side in sides:
                parts[images[roots[0]]] = side
        return kept

    def groups(self, pairs: Iterable[LabeledPair], items: Iterable[PromptItem]) -> dict[str, str]:
        """The part of each group that is decided, by the metadata or by an earlier call."""
        decided: dict[str, str] = {}
        for pair in pairs:
            for image in (pair.first, pair.second):
                if image in self.images and decided.get(pair.group) != TRAIN:
                    decided[pair.group] = self.images[image]
        for item in items:
            if part := item.split or self.themes.get(item.theme):
                decided[item.group] = part
        return decided

    def add(
        self, pairs: Iterable[LabeledPair], items: Iterable[PromptItem], testing: set[str]
    ) -> None:
        """Take in what a call decided; ``testing``: its groups of TEST."""
        themed = set()
        for item in items:
            self.themes[item.theme] = TEST if item.group in testing else TRAIN
            themed.add(item.group)
        for pair in pairs:
            if pair.group not in themed:
                part = TEST if pair.group in testing else TRAIN
                self.images |= {pair.first: part, pair.second: part}


def part_of_theme(split: Split, theme: str, place: Path) -> str:
    """The part of a theme. Raises UserError: It is in no part yet."""
    if theme not in split.themes:
        raise UserError(
            f"{place / SPLIT} does not say where {theme[:60]!r} belongs: repeat `paco-reward "
            "build-dataset --sets_only`"
        )
    return split.themes[theme]
