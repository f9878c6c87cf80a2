"""The judge's training data: grids of the shapes world, and an annotator who knows what is shown in them.

    python -m paco_toy.reward_data draw --out DIR        grids and their prompts (metadata.jsonl)
    paco-reward build-dataset … --sets_only              sub-figures and the sets to be ranked
    python -m paco_toy.reward_data annotate --out DIR    rankings and reasons, as people would write them
    paco-reward build-dataset … --rankings … --reasons_file …

DIR/metadata.jsonl, grids/<idx>/<generation>.png, drawn.json (the characters shown), rankings.jsonl, reasons.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from paco_toy.world import (
    ATTRIBUTES,
    CHARACTERS,
    VIEWS,
    Character,
    assemble_grid,
    departed,
    grid_prompt,
    random_jitter,
    render_panel,
    split_characters,
    to_uint8,
    write_jsonl,
)

PANEL_SIDES = (16, 32, 64)  # the judge sees panels of 32, 64 and 128 px grids
GENERATIONS = 4
DEPARTURES = 0.25  # share of panels that do not show their grid's character
PROMPTS = {"train": 480, "test": 63}  # about 5300 and 700 pairs


def roughened(pixels: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """A rendered image, float (S, S, 3) in [0, 1], with light noise (up to 0.08) like a generator's."""
    return Image.fromarray(to_uint8(pixels + rng.normal(scale=rng.uniform(0, 0.08), size=pixels.shape)))


def departed_within(character: int, pool: set[int], rng: np.random.Generator) -> int:
    """Another character in the pool, mostly with one attribute changed."""
    while (other := departed(character, rng, one_attribute=0.8)) not in pool:
        pass
    return other


def draw(out: Path, seed: int, prompts: dict[str, int] | None = None) -> None:
    """Grids as inconsistent as a generator's: two of a prompt's four show another character, and single panels depart.

    A prompt's theme is therefore no hint: two panels may agree on a character that it does not name. Training grids show only
    training characters; test prompts name held-out ones.
    """
    known, held_out = split_characters()
    pools = {"train": set(known), "test": set(range(len(CHARACTERS)))}
    lines, drawn = [], {}
    for split, count in (prompts or PROMPTS).items():
        rng = np.random.default_rng([seed, 20 + list(PROMPTS).index(split)])
        for number in range(count):
            anchors = known if split == "train" else held_out
            named = int(anchors[number % len(anchors)])
            other = departed_within(named, pools[split], rng)
            views = [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]
            side = PANEL_SIDES[number // len(anchors) % len(PANEL_SIDES)]
            idx = f"{split}-{number:04d}"
            (out / "grids" / idx).mkdir(parents=True, exist_ok=True)
            drawn[idx] = []
            for generation, character in enumerate(rng.permutation([named, named, other, other])):
                shown = [int(character)] * 4
                for panel in np.flatnonzero(rng.random(4) < DEPARTURES):
                    shown[panel] = departed_within(int(character), pools[split], rng)
                panels = [render_panel(CHARACTERS[c], v, side, random_jitter(rng)) for c, v in zip(shown, views, strict=True)]
                roughened(assemble_grid(panels), rng).save(out / "grids" / idx / f"{generation}.png", compress_level=1)
                drawn[idx].append(shown)
            lines.append({"idx": idx, "prompt": grid_prompt(CHARACTERS[named], views), "split": split})
    write_jsonl(out / "metadata.jsonl", lines)
    (out / "drawn.json").write_text(json.dumps(drawn), encoding="utf-8")


def differing(first: int, second: int) -> int:
    """In how many attributes two characters differ."""
    a, b = CHARACTERS[first], CHARACTERS[second]
    return sum(getattr(a, name) != getattr(b, name) for name in ATTRIBUTES)


def verdict(first: Character, second: Character) -> str:
    """The judge's answer on a pair: Yes or No first, then the reason."""
    if first == second:
        return f"Yes. Both show a {first}."
    return f"No. First a {first}, second a {second}."


def annotate(out: Path, sets: Path) -> tuple[int, int]:
    """Ranks the sets of ``sets.jsonl`` by the characters shown and writes a reason for each of their pairs.

    A set is left out unless its best candidate shows the reference's character and its worst does not.

    Returns:
        The numbers of rankings and of sets.
    """
    drawn = json.loads((out / "drawn.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(len(drawn))
    rankings, reasons = [], {}
    rows = [json.loads(line) for line in sets.read_text(encoding="utf-8").splitlines()]
    for row in rows:

        def shown(name: str, panels: list[list[int]] = drawn[row["folder"]]) -> int:
            generation, panel = name.removesuffix(".png").split("/")
            return panels[int(generation)][int(panel)]

        reference = shown(row["ref_image"])
        ranked = sorted(row["comp_images"], key=lambda name: differing(reference, shown(name)))
        if shown(ranked[0]) != reference or shown(ranked[-1]) == reference:
            continue
        rankings.append({**row, "rank_images": ranked})
        for name in ranked:
            pair = (row["ref_image"], name)[:: rng.choice([-1, 1])]
            text = verdict(*(CHARACTERS[shown(image)] for image in pair))
            reasons[row["folder"], *sorted(pair)] = {"folder": row["folder"], "images": pair, "reason": text}
    write_jsonl(out / "rankings.jsonl", rankings)
    write_jsonl(out / "reasons.jsonl", list(reasons.values()))
    return len(rankings), len(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("draw", "draw the grids"), ("annotate", "rank OUT/sets of --sets and write reasons")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--out", type=Path, required=True)
    seed = "changes every grid; not which characters are held out"
    commands.choices["draw"].add_argument("--seed", type=int, default=0, help=seed)
    sets = "sets.jsonl of paco-reward build-dataset --sets_only"
    commands.choices["annotate"].add_argument("--sets", type=Path, required=True, help=sets)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(arguments.out, arguments.seed)
        return
    ranked, sets = annotate(arguments.out, arguments.sets)
    print(f"{ranked} of {sets} sets ranked (the others have no clear best or worst)")


if __name__ == "__main__":
    main()
