"""Renders the toy data sets: `python -m paco_toy.build_world --seed 0 --out quickstart/out/world`.

prompts/{train,test}_metadata.jsonl     grid prompts (the `geneval` data set kind); half of the test prompts name held-out characters
ConsistencyRank-Bench/                  rankings against a reference image, in the benchmark's own format

The judge's training pairs are made by paco_toy.reward_data and `paco-reward build-dataset`.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
from PIL import Image

from paco_toy.reward_data import roughened, write_jsonl
from paco_toy.world import (
    CHARACTER_INDEX,
    CHARACTERS,
    COLOURS,
    SHAPES,
    STYLES,
    VIEWS,
    Character,
    grid_prompt,
    random_jitter,
    render_panel,
    split_characters,
    theme,
)

logger = logging.getLogger(__name__)

_SPLITS = {"train": 0, "test": 1}


def build_prompts(out: Path, seed: int, train: int = 2000, test: int = 256) -> None:
    """Prompt sets. Training names training characters only; every second test prompt names a held-out one.

    The test set is longer than one evaluation: settings are chosen on its end, reported on its start (or on another seed).
    """
    known, held_out = split_characters()
    for split, count in (("train", train), ("test", test)):
        rng = np.random.default_rng([seed, 10 + _SPLITS[split]])
        rows = []
        for i in range(count):
            is_held_out = split == "test" and i % 2 == 1
            character = CHARACTERS[rng.choice(held_out if is_held_out else known)]
            views = [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]
            rows.append(
                {
                    "idx": f"{split}-{i:04d}",
                    "prompt": grid_prompt(character, views),
                    "layout": "2x2",
                    "theme": theme(character),
                    "category": "held-out character" if is_held_out else "training character",
                    "task_name": "shapes",
                }
            )
        write_jsonl(out / f"{split}_metadata.jsonl", rows)


def _panel(character: int, side: int, rng: np.random.Generator) -> Image.Image:
    view = VIEWS[rng.integers(len(VIEWS))]
    return roughened(render_panel(CHARACTERS[character], view, side, random_jitter(rng)), rng)


def _ranked_away(character: Character, rng: np.random.Generator) -> list[Character]:
    """The character itself, then with one, two and three attributes changed."""
    fields = {"style": character.style, "colour": character.colour, "shape": character.shape}
    values = {"style": STYLES, "colour": tuple(COLOURS), "shape": SHAPES}
    ranked = [character]
    for name in rng.permutation(list(fields)):
        fields[name] = str(rng.choice([v for v in values[name] if v != fields[name]]))
        ranked.append(Character(**fields))
    return ranked


def build_rank_benchmark(out: Path, seed: int, items: int = 60) -> None:
    """A folder in ConsistencyRank-Bench's format: the best candidate shows the reference's character, the others ever less of it."""
    _, held_out = split_characters()
    rng = np.random.default_rng([seed, 30])
    prompts, ranks = [], []
    for i in range(items):
        reference = CHARACTERS[rng.choice(held_out)]
        folder = f"{i:04d}"
        (out / "images" / folder).mkdir(parents=True, exist_ok=True)
        _panel(CHARACTER_INDEX[reference], 64, rng).save(out / "images" / folder / "ref.png")
        shuffled = rng.permutation(4)
        ranked = [f"{shuffled[r]}.png" for r in range(4)]
        for name, character in zip(ranked, _ranked_away(reference, rng)):
            _panel(CHARACTER_INDEX[character], 64, rng).save(out / "images" / folder / name)
        criteria = {
            "Style": {"Fill": "Both subfigures use the same fill: filled, outlined or striped."},
            "Identity": {
                "Shape": "Both subfigures show the same shape.",
                "Colour": "Both subfigures show the same colour.",
            },
        }
        prompts.append({"idx": folder, "prompt": f"Two views of a {reference}.", "criteria": criteria})
        row = {"folder": folder, "ref_image": "ref.png", "comp_images": sorted(ranked), "rank_images": ranked}
        ranks.append(row)
    write_jsonl(out / "prompt_data.jsonl", prompts)
    write_jsonl(out / "consistency_full_rank.jsonl", ranks)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=0, help="changes every panel, pair and prompt; not which characters are held out"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_prompts(arguments.out / "prompts", arguments.seed)
    logger.info("prompts written")
    build_rank_benchmark(arguments.out / "ConsistencyRank-Bench", arguments.seed)
    logger.info("benchmark written")


if __name__ == "__main__":
    main()
