"""What the steps of building a data set exchange."""

from dataclasses import dataclass, field
from pathlib import Path

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class PromptItem:
    """One prompt with its sub-figures, which are named inside the prompt's folder.

    ``folder``: its name in every file written (the metadata's ``idx``). ``place``: the line it was read from. ``group``:
    equal for prompts that share a theme; train and test are split by it. ``split``: ``train`` or ``test`` where the
    metadata decides, else empty. ``sources``: by name, the file and the panel of it to be cut out (None: all of it).
    ``generations``: names of the rows x cols sub-figures of each, row-major; a name in none of them is of unknown
    generation, and only a file of rankings can pair it.
    """

    folder: str
    prompt: str
    theme: str
    rows: int
    cols: int
    place: str
    group: str = ""
    split: str = ""
    sources: dict[str, tuple[Path, int | None]] = field(default_factory=dict)
    generations: tuple[tuple[str, ...], ...] = ()

    @property
    def panels(self) -> int:
        return self.rows * self.cols

    def files(self) -> list[Path]:
        """All its image files."""
        return list(dict.fromkeys(file for file, _ in self.sources.values()))


@dataclass(frozen=True)
class EditRow:
    """One edit; ``labels`` holds the known ones of ``consistency`` and ``follows``."""

    place: str
    source: Path
    edited: Path
    instruction: str
    labels: dict[str, bool]


@dataclass(frozen=True)
class CandidateSet:
    """A reference and the candidates to be ranked against it; names are relative to the prompt's folder."""

    folder: str
    ref_image: str
    comp_images: tuple[str, ...]


@dataclass(frozen=True)
class Ranking:
    """``rank_images``: the candidates, best first. ``scores``: P(Yes) in the same order, where a judge gave them."""

    folder: str
    ref_image: str
    rank_images: tuple[str, ...]
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LabeledPair:
    """Two images (paths relative to the data set's folder), the question about them and its answer.

    ``kind``: ``theme``, ``editing_consistency`` or ``editing_instruction``. ``group``: the unit of the train/test
    split. ``reason``: the whole answer, beginning with Yes or No, once it is written.
    """

    first: str
    second: str
    question: str
    label: bool
    kind: str
    group: str
    reason: str | None = None

    @property
    def verdict(self) -> str:
        """``Yes`` or ``No``."""
        return "Yes" if self.label else "No"

    @property
    def answer(self) -> str:
        """The training target."""
        return self.reason or self.verdict
