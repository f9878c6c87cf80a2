"""The judge's training data: grids of the shapes world, and an annotator who knows what is shown in them.

    python -m paco_toy.reward_data draw --out DIR        grids and their prompts (metadata.jsonl)
    paco-reward build-dataset … --sets_only              sub-figures and the sets to be ranked
    python -m paco_toy.reward_data annotate --out DIR    rankings and reasons, as people would write them
    paco-reward build-dataset … --rankings … --reasons_file …
    python -m paco_toy.reward_data finish --out DIR      kinds of themes, and pairs with broken panels

DIR/metadata.jsonl, grids/<idx>/<generation>.png, drawn.json (the characters shown), rankings.jsonl, reasons.jsonl

A third of the pairs is asked with a theme that names the whole character, a third with one that leaves some of it open, a third
without a theme. A pair is a Yes only if the characters are the same, whatever the theme names. In a quarter of the No pairs one or
both panels are broken: they show nothing clear.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from paco_judge.questions import DEFAULT_FORM, load_question, theme_question
from paco_reward.datasets import pair_prefix
from paco_toy.oracle import read_grids, read_prompt
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTERS,
    OPENINGS,
    VIEWS,
    Character,
    assemble_grid,
    departed,
    grid_prompt,
    opened,
    random_jitter,
    render_panel,
    split_characters,
    theme,
    to_uint8,
    with_article,
    write_jsonl,
)

PANEL_SIDES = (16, 32, 64)  # the judge sees panels of 32, 64 and 128 px grids
GENERATIONS = 4
DEPARTURES = 0.25  # share of panels that do not show their grid's character
PROMPTS = {"train": 480, "test": 84}  # about 5300 and 930 pairs
THEMES = ("full", "open", "none")
TRAIN = "toy_pairs_cot_train"
TESTS = tuple(f"toy_pairs_{kind}_test" for kind in (*THEMES, "weak"))  # equal numbers; weak: every No has a broken panel
BROKEN_TRAINING = 4  # one of so many No pairs has a broken panel
BROKEN_STEPS = 6  # of the denoising that ends early
BROKEN_GRIDS = 24  # of each size and number of steps, and of blanks; twice as many of merged panels


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


def verdict(first: Character | None, second: Character | None) -> str:
    """The judge's answer on a pair: Yes or No first, then the reason. None: the panel is broken."""
    if first == second and first is not None:
        return f"Yes. Both show {with_article(first)}."
    first, second = ("nothing clear" if shown is None else with_article(shown) for shown in (first, second))
    return f"No. First {first}, second {second}."


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


def question(kind: str, named: Character, rng: np.random.Generator) -> str:
    """What is asked of a pair: about the named character, about it with something left open, or without a theme."""
    if kind == "none":
        return load_question("pair").text()
    return theme_question(theme(opened(named, OPENINGS[rng.integers(len(OPENINGS))]) if kind == "open" else named))


def broken_pair(row: dict, names: list[str], rng: np.random.Generator) -> None:
    """Puts a broken panel in the place of the first image, the second, or both, and says so in the answer."""
    texts = re.findall(r"(?:First|second) an? ([a-z ]+)", row["messages"][1]["content"])
    shown = [Character(*text.split()) for text in texts]
    number = int(rng.integers(len(names)))
    for place in ((0,), (1,), (0, 1))[rng.integers(3)]:
        row["images"][place], shown[place] = names[(number + place) % len(names)], None
    row["messages"][1]["content"] = verdict(*shown)


def _unfinished(flux: Path, seed: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Grids, float (2S, 2S, 3) in [0, 1], whose denoising the toy FLUX ends after two, three or four of ``BROKEN_STEPS`` steps."""
    import torch
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(flux, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator, grids = torch.Generator().manual_seed(seed), []
    for size, last in itertools.product((32, 64), (1, 2, 3)):

        def end(pipe: FluxPipeline, step: int, timestep: object, tensors: dict, last: int = last) -> dict:
            pipe._interrupt = step >= last  # diffusers' way to stop a pipeline
            return tensors

        characters = rng.integers(len(CHARACTERS), size=BROKEN_GRIDS)
        prompts = [grid_prompt(CHARACTERS[c], [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]) for c in characters]
        grids += list(pipe(prompts, height=size, width=size, num_inference_steps=BROKEN_STEPS, guidance_scale=3.5, generator=generator,
                           callback_on_step_end=end, max_sequence_length=pipe.tokenizer_2.model_max_length,
                           output_type="np").images)  # fmt: skip
    return grids


def _merged(side: int, rng: np.random.Generator) -> np.ndarray:
    """Two panels of different characters on top of each other."""
    two = [CHARACTERS[c] for c in rng.choice(len(CHARACTERS), size=2, replace=False)]
    panels = [render_panel(c, VIEWS[rng.integers(len(VIEWS))], side, random_jitter(rng)) for c in two]
    return np.minimum(*panels) if rng.random() < 0.5 else sum(panels) / 2


def _blank(side: int, rng: np.random.Generator) -> np.ndarray:
    """A panel in one color, mostly white."""
    return np.ones((side, side, 3)) * (1.0 if rng.random() < 0.6 else rng.random(3))


def broken_panels(flux: Path, seed: int) -> list[Image.Image]:
    """Panels that the oracle calls invalid, as a weak generator draws them: a judge that never saw any can be exploited with them.

    Neighbors in the list are mostly of one kind and one grid.
    """
    rng = np.random.default_rng([seed, 40])
    images = [Image.fromarray(to_uint8(grid)) for grid in _unfinished(flux, seed, rng)]
    for make in (_blank, _merged, _merged):
        for number in range(BROKEN_GRIDS):
            side = (16, 32, 64)[number % 3]
            images.append(roughened(assemble_grid([make(side, rng) for _ in range(4)]), rng))
    found = []
    for image, valid in zip(images, read_grids(images).valid, strict=True):
        side = image.width // 2
        corners = [(x, y, x + side, y + side) for y in (0, side) for x in (0, side)]
        found += [image.crop(corner) for corner, fine in zip(corners, valid, strict=True) if not fine]
    return found


def finish(out: Path, data: Path, flux: Path, seed: int) -> None:
    """Sets the questions of the pairs in ``data``, breaks panels, and divides the test into ``TESTS``."""
    panels = broken_panels(flux, seed)
    names = [f"images/broken/{number:04d}.png" for number in range(len(panels))]
    (data / "images" / "broken").mkdir(parents=True, exist_ok=True)
    for name, panel in zip(names, panels, strict=True):
        panel.save(data / name, compress_level=1)
    lines = map(json.loads, (out / "metadata.jsonl").read_text(encoding="utf-8").splitlines())
    named = {line["idx"]: read_prompt(line["prompt"])[0] for line in lines}
    info = json.loads((data / "dataset_info.json").read_text(encoding="utf-8"))
    sets: dict[str, list[dict]] = {name: [] for name in (TRAIN, *TESTS)}
    for split, targets in (("train", (TRAIN,)), ("test", TESTS)):
        rng = np.random.default_rng([seed, 50, split == "test"])
        pool = [name for number, name in enumerate(names) if (number // 16 % 4 == 0) == (split == "test")]
        file = data / f"toy_pairs_cot_{split}.json"
        rows = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        for label in ("Yes", "No"):
            own = [row for row in rows if row["messages"][1]["content"].startswith(label)]
            for number, row in enumerate(own[: len(own) // len(targets) * len(targets)]):
                target = targets[number % len(targets)]
                kind = dict(zip(TESTS, THEMES)).get(target) or THEMES[number // len(targets) % len(THEMES)]
                text = question(kind, named[Path(row["images"][0]).parts[1]], rng)
                row["messages"][0]["content"] = pair_prefix(DEFAULT_FORM) + text
                if label == "No" and (target == TESTS[-1] or target == TRAIN and number % BROKEN_TRAINING == 0):
                    broken_pair(row, pool, rng)
                sets[target].append(row)
    for name, rows in sets.items():
        (data / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    info = {name: info[TRAIN] | {"file_name": f"{name}.json"} for name in sets}
    (data / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("draw", "annotate", "finish"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="changes every grid; not which characters are held out")
    parser.add_argument("--sets", type=Path, help="annotate: sets.jsonl of paco-reward build-dataset --sets_only")
    parser.add_argument("--data", type=Path, help="finish: output folder of paco-reward build-dataset")
    parser.add_argument("--flux", type=Path, help="finish: the toy FLUX, a weak generator")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(arguments.out, arguments.seed)
    elif arguments.command == "finish":
        finish(arguments.out, arguments.data, arguments.flux, arguments.seed)
    else:
        ranked, sets = annotate(arguments.out, arguments.sets)
        print(f"{ranked} of {sets} sets ranked (the others have no clear best or worst)")


if __name__ == "__main__":
    main()
