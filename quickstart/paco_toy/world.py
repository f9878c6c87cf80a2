"""The shapes world: characters, views, the renderer, and prompts in the grammar of real data sets.

A *character* is shape x colour x style (105 of them), a *view* is position x size (10). A panel
shows one character in one view on white, and an image is a 2x2 grid of panels. A full prompt names
one character and four different views. An open prompt leaves one or two attributes of the character
open, and in a consistent image the panels agree on them. "Colour" and "centre" are spelled as in
the committed weights.

S is a panel's side in pixels. The last axis is RGB. Pixels are float32 in [0, 1].
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (0.86, 0.12, 0.12),
    "yellow": (0.95, 0.78, 0.05),
    "green": (0.10, 0.58, 0.22),
    "cyan": (0.04, 0.66, 0.76),
    "blue": (0.12, 0.25, 0.86),
    "purple": (0.62, 0.16, 0.74),
    "black": (0.12, 0.12, 0.12),
}
STYLES = ("filled", "outlined", "striped")
# The attributes of a character, in the order of their words in a prompt.
ATTRIBUTES = {"style": STYLES, "colour": tuple(COLOURS), "shape": SHAPES}
POSITIONS = {
    "centre": (0.5, 0.5),
    "left": (0.34, 0.5),
    "right": (0.66, 0.5),
    "top": (0.5, 0.34),
    "bottom": (0.5, 0.66),
}
SIZES = {"small": 0.22, "big": 0.33}  # radius as a share of the panel's side
LABELS = ("[TOP]-[LEFT]:", "[TOP]-[RIGHT]:", "[BOTTOM]-[LEFT]:", "[BOTTOM]-[RIGHT]:")
# The sets of attributes that a prompt can leave open.
OPENINGS = (*itertools.combinations(ATTRIBUTES, 1), *itertools.combinations(ATTRIBUTES, 2))
# Width of the outline in radii: thin where the body is narrow, so that its inside stays visible.
OUTLINES = {"circle": 0.28, "square": 0.28, "triangle": 0.25, "star": 0.17, "cross": 0.17}
_SUPERSAMPLE = 3
OPEN = ""  # the value of an attribute that a prompt does not name
JITTER = 0.012  # largest shift of a shape from its position, as a share of the panel's side
MAX_NOISE = 0.08  # largest standard deviation of the noise that ``to_image`` adds
KINDS = ("training character", "held-out character")  # an item's category in the data sets


@dataclass(frozen=True, order=True)
class Character:
    """What the panels of a consistent image share. In a prompt, an attribute may be ``OPEN``."""

    style: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.style, self.colour, self.shape or "character")))

    @property
    def left_open(self) -> tuple[str, ...]:
        """The attributes that are open."""
        return tuple(name for name in ATTRIBUTES if getattr(self, name) == OPEN)


@dataclass(frozen=True, order=True)
class View:
    """Where a panel shows its character, and how big."""

    size: str
    position: str

    def __str__(self) -> str:
        return f"{self.size} {self.position}"


CHARACTERS = tuple(Character(*c) for c in itertools.product(STYLES, COLOURS, SHAPES))
VIEWS = tuple(View(*v) for v in itertools.product(SIZES, POSITIONS))
CHARACTER_INDEX = {c: i for i, c in enumerate(CHARACTERS)}
VIEW_INDEX = {v: i for i, v in enumerate(VIEWS)}


# Attribute -> int (105,): which of its values each character has.
ATTRIBUTE_VALUES: dict[str, np.ndarray] = {}
for _name, _values in ATTRIBUTES.items():
    ATTRIBUTE_VALUES[_name] = np.array([_values.index(getattr(c, _name)) for c in CHARACTERS])
# Indices into CHARACTERS, the same for every seed. Base models know all characters, but LoRA and RL
# see only KNOWN.
HELD_OUT = tuple(sorted(np.random.default_rng(20251204).permutation(len(CHARACTERS))[:21].tolist()))
KNOWN = tuple(i for i in range(len(CHARACTERS)) if i not in HELD_OUT)


def _polygon_distance(x: np.ndarray, y: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Distance from points to a simple polygon with ``corners`` (K, 2), negative inside."""
    distance = np.full(x.shape, np.inf, dtype=np.float32)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0)):
        # The edge from corner a to corner b, and the points as seen from a.
        edge_x = bx - ax
        edge_y = by - ay
        from_a_x = x - ax
        from_a_y = y - ay
        along = (from_a_x * edge_x + from_a_y * edge_y) / (edge_x * edge_x + edge_y * edge_y)
        along = np.clip(along, 0, 1)
        to_edge = np.hypot(from_a_x - edge_x * along, from_a_y - edge_y * along)
        distance = np.minimum(distance, to_edge)
        # A point is inside if a ray to its right crosses an odd number of edges.
        edge_crosses_row = (ay > y) != (by > y)
        crossing_x = edge_x * from_a_y / np.where(edge_y == 0, 1, edge_y) + ax
        inside ^= edge_crosses_row & (x < crossing_x)
    return np.where(inside, -distance, distance)


def _signed_distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distance to the outline of a shape of radius 1 around 0, negative inside; y points down."""
    if shape == "circle":
        return np.hypot(x, y) - 0.95
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.82
    if shape == "cross":
        bar = np.maximum(np.abs(x) - 1.0, np.abs(y) - 0.38)
        return np.minimum(bar, np.maximum(np.abs(x) - 0.38, np.abs(y) - 1.0))
    if shape == "triangle":
        corners = np.array([(0.0, -0.95), (1.05, 0.85), (-1.05, 0.85)])
    else:
        angles = -np.pi / 2 + np.arange(10) * np.pi / 5
        radii = np.where(np.arange(10) % 2 == 0, 1.12, 0.52)
        corners = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
    return _polygon_distance(x, y, corners)


@lru_cache(maxsize=64)  # characters that differ only in colour and style share it
def _geometry(
    shape: str, view: View, side: int, jitter: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Distance to the outline and a diagonal coordinate, in radii, on the supersampled panel."""
    radius = SIZES[view.size]
    position_x, position_y = POSITIONS[view.position]
    center_x = position_x + jitter[0]
    center_y = position_y + jitter[1]
    num_samples = side * _SUPERSAMPLE
    samples = (np.arange(num_samples, dtype=np.float32) + 0.5) / num_samples
    x, y = np.meshgrid((samples - center_x) / radius, (samples - center_y) / radius)
    return _signed_distance(shape, x, y), x + y


def render_panel(
    character: Character, view: View, side: int, jitter: tuple[float, float] = (0.0, 0.0)
) -> np.ndarray:
    """One panel, float32 (S, S, 3), shifted by ``jitter`` (x, y), a share of the side."""
    distance, diagonal = _geometry(character.shape, view, side, jitter)
    colour = np.array(COLOURS[character.colour], dtype=np.float32)
    body = distance < 0
    image = np.ones((*body.shape, 3), dtype=np.float32)
    if character.style == "filled":
        image[body] = colour
    elif character.style == "outlined":
        image[body & (distance > -OUTLINES[character.shape])] = colour
    else:
        # A light tint keeps the silhouette. Coarse stripes carry the style at small sizes.
        image[body] = 1 - 0.35 * (1 - colour)
        image[body & (np.floor(diagonal / 0.5) % 2 == 0)] = colour
    return image.reshape(side, _SUPERSAMPLE, side, _SUPERSAMPLE, 3).mean(axis=(1, 3))


def random_jitter(rng: np.random.Generator) -> tuple[float, float]:
    """A shift (x, y), as a share of the panel's side."""
    return tuple(rng.uniform(-JITTER, JITTER, size=2).tolist())


def assemble_grid(panels: list[np.ndarray]) -> np.ndarray:
    """Four (S, S, 3) panels, row-major, as one (2S, 2S, 3) image."""
    return np.vstack([np.hstack(panels[:2]), np.hstack(panels[2:])])


def render_grid(
    characters: Sequence[Character],
    views: Sequence[View],
    side: int,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Four panels as one (2S, 2S, 3) image; with ``rng``, each has a random jitter."""
    panels = []
    for character, view in zip(characters, views, strict=True):
        jitter = (0.0, 0.0) if rng is None else random_jitter(rng)
        panels.append(render_panel(character, view, side, jitter))
    return assemble_grid(panels)


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Pixels in [0, 1] as bytes."""
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)


def to_image(image: np.ndarray, rng: np.random.Generator | None = None) -> Image.Image:
    """An image of these pixels; with ``rng``, with light noise like a generator's."""
    if rng is not None:
        scale = rng.uniform(0, MAX_NOISE)
        image = image + rng.normal(scale=scale, size=image.shape)
    return Image.fromarray(to_uint8(image))


def with_article(thing: object) -> str:
    """``thing`` as text after "a" or "an"."""
    article = "an" if str(thing)[0] in "aeiou" else "a"
    return f"{article} {thing}"


def theme(character: Character) -> str:
    """The part of a prompt before its first panel label; silent on open attributes."""
    subject = character.shape or "character"
    described = f"2x2 grid layout depicting {with_article(character)}."
    # The data set's own prompts have no space between these two sentences either.
    return f"{described}The same {subject} throughout."


def grid_prompt(character: Character, views: list[View]) -> str:
    """A prompt in the grammar of the T2IS data (docs/method.md §2)."""
    panels = " ".join(f"{label}{view}." for label, view in zip(LABELS, views, strict=True))
    return f"{theme(character)} {panels}"


def changed(character: Character, attribute: str, rng: np.random.Generator) -> Character:
    """The character with another value of the attribute."""
    rest = [value for value in ATTRIBUTES[attribute] if value != getattr(character, attribute)]
    return dataclasses.replace(character, **{attribute: str(rng.choice(rest))})


def departed(character: int, rng: np.random.Generator, one_attribute: float = 0.75) -> int:
    """Another character's index.

    It differs in one attribute with probability ``one_attribute``, and is any other character else.
    """
    if rng.random() >= one_attribute:
        other = int(rng.integers(len(CHARACTERS) - 1))
        return other + 1 if other >= character else other
    attribute = list(ATTRIBUTES)[rng.integers(len(ATTRIBUTES))]
    return CHARACTER_INDEX[changed(CHARACTERS[character], attribute, rng)]


def opened(character: Character, attributes: Iterable[str]) -> Character:
    """The character with these attributes left open."""
    return dataclasses.replace(character, **dict.fromkeys(attributes, OPEN))
