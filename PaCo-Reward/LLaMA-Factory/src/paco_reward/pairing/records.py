"""What travels between the steps of building a data set."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Generation:
    """One generated set of sub-figures.

    ``files``: one grid image that is still to be cut (``is_grid``), or rows x cols files, row-major. ``names``: what its
    rows x cols sub-figures are called inside the prompt's folder, row-major.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    is_grid: bool


@dataclass(frozen=True)
class PromptItem:
    """One prompt with its images.

    ``folder``: its name in every file written (the metadata's ``idx``). ``group``: equal for prompts that share a
    theme; train and test are split by it. ``loose``: names and files of sub-figures whose generation is not known, which
    only a file of rankings can pair. ``split``: ``train`` or ``test`` where the metadata decides, else empty. ``place``:
    where the prompt was read.
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

    def names(self) -> dict[str, None]:
        """The names of all its sub-figures, in order."""
        own = [name for generation in self.generations for name in generation.names]
        return dict.fromkeys([*own, *(name for name, _ in self.loose)])

    def files(self) -> list[Path]:
        """All its image files."""
        return [file for g in self.generations for file in g.files] + [file for _, file in self.loose]


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
class LabelledPair:
    """Two images (paths relative to the data set's folder), the question on them and its answer.

    ``kind``: ``theme``, ``editing_consistency`` or ``editing_instruction``. ``group``: what train and test are split
    by. ``reason``: the whole answer, beginning with Yes or No; None until one is written.
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
        """What the judge learns to answer."""
        return self.reason or self.verdict
