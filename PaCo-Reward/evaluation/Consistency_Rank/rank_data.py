"""ConsistencyRank-Bench from disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from paco_eval.errors import BenchError, ItemError
from paco_eval.images import read_image
from paco_judge.client import Pair
from paco_judge.questions import criteria_questions, pair_question

BENCH = "ConsistencyRank-Bench"
RANKS = "consistency_full_rank.jsonl"
PROMPTS = "prompt_data.jsonl"


@dataclass(frozen=True)
class RankItem:
    """One reference and its candidates; `true_order` holds candidate indices, best first."""

    index: int
    folder: str
    ref_image: str
    comp_images: tuple[str, ...]
    true_order: tuple[int, ...]

    @property
    def key(self) -> tuple[int, str, str]:
        """What makes the item the same in a results file."""
        return self.index, self.folder, self.ref_image

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"item {self.folder}"


@dataclass
class Bench:
    """A benchmark folder: its items, the rows that are broken (with their reason), criteria by folder."""

    root: Path
    items: list[RankItem] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    criteria: dict[str, dict] = field(default_factory=dict)


def find_bench(dataset_dir: str | None) -> Path:
    """The benchmark folder: `dataset_dir` or what it holds; default: the first of ., .., ../.. that holds it.

    Raises:
        BenchError: not found; says how it is downloaded.
    """
    places = [Path(dataset_dir)] if dataset_dir else [Path("."), Path(".."), Path("../..")]
    for place in places:
        for folder in (place / BENCH, place):
            if (folder / RANKS).is_file():
                return folder
    looked = ", ".join(str(place.resolve()) for place in places)
    raise BenchError(
        f"no {BENCH} with {RANKS} in {looked}; download it with "
        f"`hf download X-GenGroup/{BENCH} --repo-type dataset --local-dir {BENCH}` or pass --dataset_dir"
    )


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BenchError(f"{file} cannot be read: {error}") from error


def load_bench(root: Path, with_criteria: bool) -> Bench:
    """Read the rankings, and the criteria where they are asked for. Broken rows are listed, not raised."""
    bench = Bench(root)
    for index, row in enumerate(_read_jsonl(root / RANKS)):
        try:
            bench.items.append(_item(index, row))
        except (KeyError, TypeError, ValueError) as error:
            folder = row.get("folder", f"line {index + 1}") if isinstance(row, dict) else f"line {index + 1}"
            bench.broken.append((str(folder), f"broken row: {error}"))
    if with_criteria:
        for row in _read_jsonl(root / PROMPTS):
            bench.criteria[str(row.get("idx"))] = row.get("criteria") or {}
    return bench


def _item(index: int, row: dict[str, Any]) -> RankItem:
    compared, ranked = list(row["comp_images"]), list(row["rank_images"])
    if sorted(compared) != sorted(ranked) or len(set(compared)) != len(compared):
        raise ValueError(f"rank_images {ranked} are not the comp_images {compared} in another order")
    if len(compared) < 2:
        raise ValueError(f"a ranking needs at least two candidates, not {len(compared)}")
    order = tuple(compared.index(name) for name in ranked)
    return RankItem(index, str(row["folder"]), str(row["ref_image"]), tuple(compared), order)


def item_pairs(bench: Bench, item: RankItem, template: int) -> tuple[list[Pair], list[list[str]]]:
    """The pairs to score, candidate after candidate, and each question's dimension, candidate after candidate.

    template 1: one question per criterion; 2: Yes or No only; 3: Yes or No, then reasons (one question each).

    Raises:
        ItemError: an unreadable image, or no criteria for template 1.
    """
    if template == 1:
        try:
            asked = criteria_questions(_criteria(bench, item.folder))
        except ValueError as error:
            raise ItemError(str(error)) from error
        questions = [(dimension, text) for dimension, texts in asked.items() for text in texts]
    else:
        questions = [("", pair_question(reasons=template == 3))]
    reference = _open(bench.root, item, item.ref_image)
    candidates = [_open(bench.root, item, name) for name in item.comp_images]
    pairs = [Pair(reference, candidate, text) for candidate in candidates for _, text in questions]
    return pairs, [[dimension for dimension, _ in questions] for _ in candidates]


def _criteria(bench: Bench, folder: str) -> dict:
    if folder in bench.criteria:
        return bench.criteria[folder]
    if folder.isdigit() and str(int(folder)) in bench.criteria:
        return bench.criteria[str(int(folder))]
    raise ItemError(f"{PROMPTS} has no row with idx {folder}")


def _open(root: Path, item: RankItem, name: str) -> Image.Image:
    file = root / "images" / item.folder / name
    if not file.is_file() and (root / name).is_file():
        file = root / name
    return read_image(file, str(file))
