"""Renders the toy data sets: `python -m paco_toy.build_world --seed 0 --out quickstart/out/world`.

prompts/{train,test}_metadata.jsonl     grid prompts (the `geneval` data set kind); half of the test prompts name held-out characters
reward_data/                            pairs with Yes/No answers and reasons (LLaMA-Factory ShareGPT), held-out test pairs
ConsistencyRank-Bench/                  rankings against a reference image, in the benchmark's own format
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import numpy as np
from PIL import Image

from paco_judge.questions import theme_question
from paco_toy import wording
from paco_toy.world import (
    CHARACTER_INDEX,
    CHARACTERS,
    COLOURS,
    SHAPES,
    STYLES,
    VIEWS,
    Character,
    departed,
    grid_prompt,
    random_jitter,
    render_panel,
    split_characters,
    theme,
    to_uint8,
)

logger = logging.getLogger(__name__)

PANEL_SIDES = (16, 32, 64)  # the judge sees panels of 32, 64 and 128 px grids
_SPLITS = {"train": 0, "test": 1}


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
        _write_jsonl(out / f"{split}_metadata.jsonl", rows)


def roughened(pixels: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """A rendered panel with light noise (up to 0.08), as a generator draws it. Float (S, S, 3) in [0, 1]."""
    return Image.fromarray(to_uint8(pixels + rng.normal(scale=rng.uniform(0, 0.08), size=pixels.shape)))


def _panel(character: int, side: int, rng: np.random.Generator) -> Image.Image:
    view = VIEWS[rng.integers(len(VIEWS))]
    return roughened(render_panel(CHARACTERS[character], view, side, random_jitter(rng)), rng)


def _departed_within(character: int, pool: set[int], rng: np.random.Generator) -> int:
    while (other := departed(character, rng, one_attribute=0.8)) not in pool:
        pass
    return other


def build_reward_data(out: Path, seed: int, train: int = 16000, test: int = 600) -> None:
    """Balanced Yes/No pairs in LLaMA-Factory's ShareGPT form; test pairs show held-out characters only.

    Negatives mostly differ in one attribute. The theme names one of the shown characters or, as often, some other, so that
    the question gives nothing away.
    """
    known, held_out = split_characters()
    info = {}
    for split, count, pool in (("train", train, set(known)), ("test", test, set(range(len(CHARACTERS))))):
        rng = np.random.default_rng([seed, 20 + _SPLITS[split]])
        anchors = known if split == "train" else held_out
        folder = out / "images" / split
        folder.mkdir(parents=True, exist_ok=True)
        names = _panel_files(folder, sorted(pool), 40 if split == "train" else 8, rng)
        rows = []
        for i in range(count):
            first = int(rng.choice(anchors))
            second = first if i % 2 == 0 else _departed_within(first, pool, rng)
            side = int(rng.choice(PANEL_SIDES))
            shown = [str(rng.choice(names[c, side])) for c in (first, second)]
            named = first if rng.random() < 0.5 else int(rng.choice(sorted(pool)))
            question = theme_question(theme(CHARACTERS[named]))
            answer = wording.verdict(CHARACTERS[first], CHARACTERS[second])
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": f"<image><image>{question}"},
                        {"role": "assistant", "content": answer},
                    ],
                    "images": [f"images/{split}/{name}" for name in shown],
                }
            )
        (out / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        columns = {"messages": "messages", "images": "images"}
        info[f"toy_pairs_{split}"] = {
            "file_name": f"{split}.json",
            "formatting": "sharegpt",
            "columns": columns,
            "tags": tags,
        }
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")


def _panel_files(
    folder: Path, pool: list[int], each: int, rng: np.random.Generator
) -> dict[tuple[int, int], list[str]]:
    """`each` panels of every character in the pool, over all sizes; (character, side) -> file names."""
    names: dict[tuple[int, int], list[str]] = {}
    for character in pool:
        for k in range(each):
            side = PANEL_SIDES[k % len(PANEL_SIDES)]
            name = f"{character:03d}_{side}_{k:02d}.png"
            _panel(character, side, rng).save(folder / name, compress_level=1)
            names.setdefault((character, side), []).append(name)
    return names


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
    _write_jsonl(out / "prompt_data.jsonl", prompts)
    _write_jsonl(out / "consistency_full_rank.jsonl", ranks)


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
    build_reward_data(arguments.out / "reward_data", arguments.seed)
    logger.info("reward pairs written")


if __name__ == "__main__":
    main()
