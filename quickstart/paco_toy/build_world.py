"""Renders the toy data sets: `python -m paco_toy.build_world --seed 0 --out quickstart/out/world`.

prompts/{train,test}_metadata.jsonl     grid prompts (a data set of the kind `geneval`); half of them leave color, style or
                                        both open; half of the test prompts name held-out characters
open_prompts/                           open test prompts, for several images of each (kappa, in study.py)
ConsistencyRank-Bench/                  rankings against a reference image, in the benchmark's format

The judge's training pairs are made by paco_toy.reward_data and `paco-reward build-dataset`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from PIL import Image

from paco_toy.reward_data import roughened
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTERS,
    KINDS,
    PROMPT_OPENINGS,
    VIEWS,
    Character,
    grid_prompt,
    opened,
    random_jitter,
    render_panel,
    split_characters,
    theme,
    with_article,
    write_jsonl,
)


def build_prompts(out: Path, seed: int, train: int = 2000, test: int = 256, open_share: float = 0.5) -> None:
    """Prompt sets. Training names only training characters; every second test prompt names a held-out one.

    Of every four prompts, 4 · ``open_share`` are open, in the test two of each kind; every opening of
    color and style is equally frequent.

    The test set is longer than one evaluation: settings are chosen on its end, reported on its start (or on another seed).
    """
    known, held_out = split_characters()
    for number, (split, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng([seed, 10 + number])
        rows = []
        for i in range(count):
            is_held_out = split == "test" and i % 2 == 1
            character = CHARACTERS[rng.choice(held_out if is_held_out else known)]
            if i % 4 >= 4 * (1 - open_share):
                character = opened(character, PROMPT_OPENINGS[i // 4 % len(PROMPT_OPENINGS)])
            views = [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]
            row = {"idx": f"{split}-{i:04d}", "prompt": grid_prompt(character, views), "layout": "2x2"}
            is_open = bool(character.left_open)  # does it leave a choice? Asked by between_images
            row |= {"theme": theme(character), "task_name": "shapes", "open": is_open}
            row["category"] = f"{'open' if is_open else 'full'} prompt, {KINDS[is_held_out]}"
            rows.append(row)
        write_jsonl(out / f"{split}_metadata.jsonl", rows)


def _panel(character: Character, rng: np.random.Generator) -> Image.Image:
    view = VIEWS[rng.integers(len(VIEWS))]
    return roughened(render_panel(character, view, 64, random_jitter(rng)), rng)


def _ranked_away(character: Character, rng: np.random.Generator) -> list[Character]:
    """The character itself, then with one, two and three attributes changed."""
    ranked = [character]
    for name in rng.permutation(list(ATTRIBUTES)):
        other = rng.choice([v for v in ATTRIBUTES[name] if v != getattr(character, name)])
        ranked.append(dataclasses.replace(ranked[-1], **{str(name): str(other)}))
    return ranked


def build_rank_benchmark(out: Path, seed: int, items: int = 160) -> None:
    """A folder in ConsistencyRank-Bench's format: better candidates share more attributes with the reference's character."""
    _, held_out = split_characters()
    rng = np.random.default_rng([seed, 30])
    criteria = {
        "Style": {"Fill": "Both subfigures use the same fill: filled, outlined or striped."},
        "Identity": {"Shape": "Both subfigures show the same shape.", "Colour": "Both subfigures show the same colour."},
    }
    prompts, ranks = [], []
    for i in range(items):
        reference, folder = CHARACTERS[rng.choice(held_out)], f"{i:04d}"
        images = out / "images" / folder
        images.mkdir(parents=True, exist_ok=True)
        _panel(reference, rng).save(images / "ref.png")
        ranked = [f"{number}.png" for number in rng.permutation(4)]
        for name, character in zip(ranked, _ranked_away(reference, rng)):
            _panel(character, rng).save(images / name)
        prompts.append({"idx": folder, "prompt": f"Two views of {with_article(reference)}.", "criteria": criteria})
        ranks.append({"folder": folder, "ref_image": "ref.png", "comp_images": sorted(ranked), "rank_images": ranked})
    write_jsonl(out / "prompt_data.jsonl", prompts)
    write_jsonl(out / "consistency_full_rank.jsonl", ranks)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="changes everything except which characters are held out")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    build_prompts(arguments.out / "prompts", arguments.seed)
    build_prompts(arguments.out / "open_prompts", arguments.seed, train=4, test=24, open_share=1.0)
    print("prompts written")
    build_rank_benchmark(arguments.out / "ConsistencyRank-Bench", arguments.seed)
    print("benchmark written")


if __name__ == "__main__":
    main()
