"""Draws the data of the shapes world, and answers for the judge's training pairs as an annotator who knows what is shown.

    python -m paco_toy.build_world world --out WORLD     prompts, a benchmark of rankings, grids for the judge's pairs
    paco-reward build-dataset … --sets_only              sub-figures of the grids, and the sets to be ranked
    python -m paco_toy.build_world annotate --out WORLD/drawn --sets …           rankings and reasons
    paco-reward build-dataset … --rankings … --reasons_file …
    python -m paco_toy.build_world finish --out WORLD/drawn --data … --flux …    kinds of themes, broken panels
    python -m paco_toy.build_world edits --out EDITS     the editing task

A third of the judge's pairs has a theme that names the whole character, a third has one that leaves some of it open,
and a third has none. A pair is a Yes only if the characters are the same, whatever the theme names. In a quarter of the
No pairs one or both panels are broken: they show nothing clear.
"""

import argparse
import itertools
import json
import re
from collections.abc import Container
from pathlib import Path

import numpy as np
from PIL import Image

from paco_judge.questions import DEFAULT_FORM, load_question, theme_question
from paco_reward.datasets import pair_prefix
from paco_toy import world
from paco_toy.edits import build_edits
from paco_toy.oracle import read_grids, read_prompt

# What the prompt sets leave open: not the shape, of which the base model draws hybrids (a third of the panels are invalid).
PROMPT_OPENINGS = tuple(o for o in world.OPENINGS if "shape" not in o)
CRITERIA = {  # of the benchmark
    "Style": {"Fill": "Both subfigures use the same fill: filled, outlined or striped."},
    "Identity": {
        "Shape": "Both subfigures show the same shape.",
        "Colour": "Both subfigures show the same colour.",
    },
}
PANEL_SIDES = (16, 32, 64)  # of grids of 32, 64 and 128 px
DEPARTURES = 0.25  # share of panels that do not show their grid's character
PROMPTS = {"train": 480, "test": 84}  # about 5400 and 930 pairs
THEMES = ("full", "open", "none")
TRAIN = "toy_pairs_cot_train"
TESTS = tuple(
    f"toy_pairs_{kind}_test" for kind in (*THEMES, "weak")
)  # equal numbers; weak: every No has a broken panel
BROKEN_TRAINING = 4  # one No pair of so many has a broken panel
BROKEN_STEPS = 6  # of the denoising that ends early
BROKEN_GRIDS = 24  # of each size and number of steps, and of blanks; twice as many of merged panels


def _four_views(rng: np.random.Generator) -> list[world.View]:
    return [world.VIEWS[v] for v in rng.permutation(len(world.VIEWS))[:4]]


def build_prompts(
    out: Path, seed: int, train: int = 2000, test: int = 256, open_share: float = 0.5
) -> None:
    """A data set of the kind ``geneval``; every second test prompt names a held-out character.

    Of every four prompts, 4 · ``open_share`` leave color, style or both open, each equally often.
    """
    for number, (split, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng([seed, 10 + number])
        rows = []
        for i in range(count):
            is_held_out = split == "test" and i % 2 == 1
            character = world.CHARACTERS[rng.choice(world.HELD_OUT if is_held_out else world.KNOWN)]
            if i % 4 >= 4 * (1 - open_share):
                character = world.opened(character, PROMPT_OPENINGS[i // 4 % len(PROMPT_OPENINGS)])
            is_open = bool(character.left_open)  # read by between_images
            category = f"{'open' if is_open else 'full'} prompt, {world.KINDS[is_held_out]}"
            row = {
                "idx": f"{split}-{i:04d}",
                "prompt": world.grid_prompt(character, _four_views(rng)),
                "layout": "2x2",
            }
            rows.append(
                row
                | {
                    "theme": world.theme(character),
                    "task_name": "shapes",
                    "open": is_open,
                    "category": category,
                }
            )
        world.write_jsonl(out / f"{split}_metadata.jsonl", rows)


def _random_panel(character: world.Character, side: int, rng: np.random.Generator) -> np.ndarray:
    view = world.VIEWS[rng.integers(len(world.VIEWS))]
    return world.render_panel(character, view, side, world.random_jitter(rng))


def build_rank_benchmark(out: Path, seed: int, items: int = 160) -> None:
    """In ConsistencyRank-Bench's format; an item's candidates differ from its reference in 0, 1, 2 and 3 attributes."""
    rng = np.random.default_rng([seed, 30])
    prompts, ranks = [], []
    for i in range(items):
        folder, reference = f"{i:04d}", world.CHARACTERS[rng.choice(world.HELD_OUT)]
        images = out / "images" / folder
        images.mkdir(parents=True, exist_ok=True)
        world.to_image(_random_panel(reference, 64, rng), rng).save(images / "ref.png")
        ranked = [f"{number}.png" for number in rng.permutation(4)]
        characters = [reference]
        for name in rng.permutation(list(world.ATTRIBUTES)):
            characters.append(world.changed(characters[-1], name, rng))
        for character, name in zip(characters, ranked, strict=True):
            world.to_image(_random_panel(character, 64, rng), rng).save(images / name)
        prompts.append(
            {
                "idx": folder,
                "prompt": f"Two views of {world.with_article(reference)}.",
                "criteria": CRITERIA,
            }
        )
        ranks.append(
            {
                "folder": folder,
                "ref_image": "ref.png",
                "comp_images": sorted(ranked),
                "rank_images": ranked,
            }
        )
    world.write_jsonl(out / "prompt_data.jsonl", prompts)
    world.write_jsonl(out / "consistency_full_rank.jsonl", ranks)


def _another(character: int, pool: Container[int], rng: np.random.Generator) -> int:
    while (other := world.departed(character, rng, one_attribute=0.8)) not in pool:
        pass
    return other


def draw(out: Path, seed: int, prompts: dict[str, int] = PROMPTS) -> None:
    """Grids as inconsistent as a generator's: two of a prompt's four show another character, and single panels depart.

    So two panels may agree on a character that the theme does not name. Training grids show only training characters;
    test prompts name held-out ones.
    """
    lines, drawn = [], {}
    for split, count in prompts.items():
        is_test = split == "test"
        rng = np.random.default_rng([seed, 20 + is_test])
        anchors, pool = (
            (world.HELD_OUT, range(len(world.CHARACTERS)))
            if is_test
            else (world.KNOWN, world.KNOWN)
        )
        for number in range(count):
            named = anchors[number % len(anchors)]
            other, views = _another(named, pool, rng), _four_views(rng)
            side = PANEL_SIDES[number // len(anchors) % len(PANEL_SIDES)]
            idx = f"{split}-{number:04d}"
            (out / "grids" / idx).mkdir(parents=True, exist_ok=True)
            drawn[idx] = []
            for generation, character in enumerate(
                rng.permutation([named, named, other, other]).tolist()
            ):
                shown = [character] * 4
                for panel in np.flatnonzero(rng.random(4) < DEPARTURES):
                    shown[panel] = _another(character, pool, rng)
                grid = world.to_image(
                    world.render_grid([world.CHARACTERS[c] for c in shown], views, side, rng), rng
                )
                grid.save(out / "grids" / idx / f"{generation}.png", compress_level=1)
                drawn[idx].append(shown)
            lines.append(
                {
                    "idx": idx,
                    "prompt": world.grid_prompt(world.CHARACTERS[named], views),
                    "split": split,
                }
            )
    world.write_jsonl(out / "metadata.jsonl", lines)
    (out / "drawn.json").write_text(json.dumps(drawn), encoding="utf-8")


def verdict(first: world.Character | None, second: world.Character | None) -> str:
    """The judge's answer on a pair, with its reason. None: the panel is broken."""
    if first == second and first is not None:
        return f"Yes. Both show {world.with_article(first)}."
    first, second = (
        "nothing clear" if shown is None else world.with_article(shown) for shown in (first, second)
    )
    return f"No. First {first}, second {second}."


def annotate(out: Path, sets: Path) -> tuple[int, int]:
    """Ranks the sets of ``sets.jsonl`` by the characters shown and writes a reason for each of their pairs.

    A set is left out unless its best candidate shows the reference's character and its worst does not. Returns the
    numbers of rankings and of sets.
    """
    drawn = json.loads((out / "drawn.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(len(drawn))
    rankings, reasons, rows = [], {}, world.read_jsonl(sets)
    for row in rows:
        shown = {}
        for name in (row["ref_image"], *row["comp_images"]):
            generation, panel = map(int, name.removesuffix(".png").split("/"))
            shown[name] = world.CHARACTERS[drawn[row["folder"]][generation][panel]]
        reference = shown[row["ref_image"]]
        differing = {
            name: sum(getattr(c, a) != getattr(reference, a) for a in world.ATTRIBUTES)
            for name, c in shown.items()
        }
        ranked = sorted(row["comp_images"], key=differing.__getitem__)
        if differing[ranked[0]] or not differing[ranked[-1]]:
            continue
        rankings.append({**row, "rank_images": ranked})
        for name in ranked:
            pair = (row["ref_image"], name)[:: rng.choice([-1, 1])]
            text = verdict(*map(shown.get, pair))
            reasons[row["folder"], *sorted(pair)] = {
                "folder": row["folder"],
                "images": pair,
                "reason": text,
            }
    world.write_jsonl(out / "rankings.jsonl", rankings)
    world.write_jsonl(out / "reasons.jsonl", reasons.values())
    return len(rankings), len(rows)


def _unfinished(flux: Path, seed: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Grids (2S, 2S, 3) in [0, 1] whose denoising ends after two, three or four of ``BROKEN_STEPS`` steps."""
    import torch
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(flux, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator, grids = torch.Generator().manual_seed(seed), []
    for size, last in itertools.product((32, 64), (1, 2, 3)):

        def end(
            pipe: FluxPipeline, step: int, timestep: object, tensors: dict, last: int = last
        ) -> dict:
            pipe._interrupt = step >= last  # diffusers' way to stop a pipeline
            return tensors

        characters = rng.integers(len(world.CHARACTERS), size=BROKEN_GRIDS)
        prompts = [world.grid_prompt(world.CHARACTERS[c], _four_views(rng)) for c in characters]
        grids += list(pipe(
            prompts, height=size, width=size, num_inference_steps=BROKEN_STEPS, guidance_scale=3.5, generator=generator,
            callback_on_step_end=end, max_sequence_length=pipe.tokenizer_2.model_max_length, output_type="np",
        ).images)  # fmt: skip
    return grids


def _merged(side: int, rng: np.random.Generator) -> np.ndarray:
    """Two characters on top of each other."""
    two = rng.choice(len(world.CHARACTERS), size=2, replace=False)
    panels = [_random_panel(world.CHARACTERS[c], side, rng) for c in two]
    return np.minimum(*panels) if rng.random() < 0.5 else sum(panels) / 2


def _blank(side: int, rng: np.random.Generator) -> np.ndarray:
    """A panel of one color, mostly white."""
    return np.ones((side, side, 3)) * (1.0 if rng.random() < 0.6 else rng.random(3))


def broken_panels(flux: Path, seed: int) -> list[Image.Image]:
    """Panels that the oracle calls invalid. Without them in training, a judge can be exploited with them."""
    rng = np.random.default_rng([seed, 40])
    images = [world.to_image(grid) for grid in _unfinished(flux, seed, rng)]
    for make in (_blank, _merged, _merged):
        for number in range(BROKEN_GRIDS):
            panels = [make(PANEL_SIDES[number % 3], rng) for _ in range(4)]
            images.append(world.to_image(world.assemble_grid(panels), rng))
    found = []
    for image, valid in zip(images, read_grids(images).valid, strict=True):
        side = image.width // 2
        corners = [(x, y, x + side, y + side) for y in (0, side) for x in (0, side)]
        found += [
            image.crop(corner) for corner, fine in zip(corners, valid, strict=True) if not fine
        ]
    return found


def finish(out: Path, data: Path, flux: Path, seed: int) -> None:
    """Sets the questions of the pairs in ``data``, breaks panels, divides the test into ``TESTS``."""
    panels = broken_panels(flux, seed)
    names = [f"images/broken/{number:04d}.png" for number in range(len(panels))]
    (data / "images" / "broken").mkdir(parents=True, exist_ok=True)
    for name, panel in zip(names, panels, strict=True):
        panel.save(data / name, compress_level=1)
    named = {
        line["idx"]: read_prompt(line["prompt"])
        for line in world.read_jsonl(out / "metadata.jsonl")
    }
    sets: dict[str, list[dict]] = {name: [] for name in (TRAIN, *TESTS)}
    for split, targets in (("train", (TRAIN,)), ("test", TESTS)):
        rng = np.random.default_rng([seed, 50, split == "test"])
        pool = [
            name
            for number, name in enumerate(names)
            if (number // 16 % 4 == 0) == (split == "test")
        ]
        file = data / f"toy_pairs_cot_{split}.json"
        rows = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        for label in ("Yes", "No"):
            own = [row for row in rows if row["messages"][1]["content"].startswith(label)]
            for number, row in enumerate(own[: len(own) // len(targets) * len(targets)]):
                target = targets[number % len(targets)]
                kind = (
                    dict(zip(TESTS, THEMES)).get(target)
                    or THEMES[number // len(targets) % len(THEMES)]
                )
                character = named[Path(row["images"][0]).parts[1]]
                if kind == "open":
                    character = world.opened(
                        character, world.OPENINGS[rng.integers(len(world.OPENINGS))]
                    )
                text = (
                    load_question("pair").text()
                    if kind == "none"
                    else theme_question(world.theme(character))
                )
                row["messages"][0]["content"] = pair_prefix(DEFAULT_FORM) + text
                if label == "No" and (
                    target == TESTS[-1] or target == TRAIN and number % BROKEN_TRAINING == 0
                ):
                    _break_panels(row, pool, rng)
                sets[target].append(row)
    for name, rows in sets.items():
        (data / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    file = data / "dataset_info.json"
    entry = json.loads(file.read_text(encoding="utf-8"))[TRAIN]
    file.write_text(
        json.dumps({name: entry | {"file_name": f"{name}.json"} for name in sets}, indent=2),
        encoding="utf-8",
    )


def _break_panels(row: dict, names: list[str], rng: np.random.Generator) -> None:
    """Puts a broken panel in the place of the first image, the second, or both, also in the answer."""
    texts = re.findall(r"(?:First|second) an? ([a-z ]+)", row["messages"][1]["content"])
    shown = [world.Character(*text.split()) for text in texts]
    number = int(rng.integers(len(names)))
    for place in ((0,), (1,), (0, 1))[rng.integers(3)]:
        row["images"][place], shown[place] = names[(number + place) % len(names)], None
    row["messages"][1]["content"] = verdict(*shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("world", "annotate", "finish", "edits"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="changes everything except which characters are held out",
    )
    parser.add_argument(
        "--sets", type=Path, help="annotate: sets.jsonl of paco-reward build-dataset --sets_only"
    )
    parser.add_argument(
        "--data", type=Path, help="finish: output folder of paco-reward build-dataset"
    )
    parser.add_argument("--flux", type=Path, help="finish: the toy FLUX, a weak generator")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    if arguments.command == "world":
        build_prompts(out / "prompts", seed)
        build_prompts(out / "open_prompts", seed, train=4, test=24, open_share=1.0)
        build_rank_benchmark(out / "ConsistencyRank-Bench", seed)
        draw(out / "drawn", seed)
    elif arguments.command == "annotate":
        ranked, sets = annotate(out, arguments.sets)
        print(f"{ranked} of {sets} sets ranked (the others have no clear best or worst)")
    elif arguments.command == "finish":
        finish(out, arguments.data, arguments.flux, seed)
    else:
        build_edits(out, seed)


if __name__ == "__main__":
    main()
