"""What the steps of building a data set exchange."""

from dataclasses import dataclass
from pathlib import Path

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class Generation:
    """One generated set of sub-figures.

    ``files``: one grid image to be cut (``is_grid``), or rows x cols files, row-major. ``names``: of its rows x cols
    sub-figures inside the prompt's folder, row-major.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    is_grid: bool


@dataclass(frozen=True)
class PromptItem:
    """One prompt with its images.

    ``folder``: its name in every file written (the metadata's ``idx``). ``group``: equal for prompts that share a
    theme; train and test are split by it. ``loose``: names and files of sub-figures of unknown generation, which only a
    file of rankings can pair. ``split``: ``train`` or ``test`` where the metadata decides, else empty. ``place``: the
    line it was read from.
    """

    folder: str
    prompt: str
    theme: str
    rows: int
    cols: int
    place: str
    group: str = ""
    generations: tuple[Generation, ...] = ()
    loose: tuple[tuple[str, Path], ...] = ()
    split: str = ""

    @property
    def panels(self) -> int:
        return self.rows * self.cols

    def names(self) -> dict[str, None]:
        """The names of all its sub-figures, in order."""
        own = [name for generation in self.generations for name in generation.names]
        return dict.fromkeys([*own, *(name for name, _ in self.loose)])

    def files(self) -> list[Path]:
        """All its image files."""
        return [file for g in self.generations for file in g.files] + [file for _, file in self.loose]


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
