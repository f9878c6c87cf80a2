"""Draws the data of the shapes world, and annotates the judge's training pairs.

    python -m paco_toy.build_world world --out WORLD
        prompts, a benchmark of rankings, grids for the judge's pairs
    paco-reward build-dataset … --sets_only
        panels of the grids, and the sets to be ranked
    python -m paco_toy.build_world annotate --out WORLD
        rankings and reasons, as of an annotator who knows what is shown
    paco-reward build-dataset … --rankings … --reasons_file …
        the judge's pairs, in WORLD/reward_data
    python -m paco_toy.build_world finish --out WORLD
        kinds of themes, broken panels
    python -m paco_toy.build_world edits --out EDITS
        the editing task

A third of the judge's pairs has a theme that names the whole character, a third has one that leaves
some of it open, and a third has none. A pair is a Yes only if the characters are the same, whatever
the theme names. In a quarter of the No pairs one or both panels are broken and show nothing clear.
"""

import argparse
import itertools
import re
from collections.abc import Container
from pathlib import Path

import numpy as np
from PIL import Image

from paco_judge.files import read_json, read_json_lines, write_json, write_json_lines
from paco_judge.questions import DEFAULT_FORM, load_question, theme_question
from paco_reward.datasets import pair_prefix
from paco_toy import world
from paco_toy.edits import build_edits
from paco_toy.oracle import read_grids, read_prompt

FLUX = Path(__file__).resolve().parents[1] / "models" / "flux"  # a weak generator
# What the prompt sets leave open. Not the shape, of which the base model draws hybrids: a third of
# the panels are invalid.
PROMPT_OPENINGS = tuple(opening for opening in world.OPENINGS if "shape" not in opening)
CRITERIA = {  # of the benchmark
    "Style": {"Fill": "Both subfigures use the same fill: filled, outlined or striped."},
    "Identity": {
        "Shape": "Both subfigures show the same shape.",
        "Colour": "Both subfigures show the same colour.",
    },
}
PANEL_SIDES = (16, 32, 64)  # of grids of 32, 64 and 128 px
DEPARTURES = 0.25  # share of panels that do not show their grid's character
PROMPTS = {"train": 444, "test": 84}  # about 5000 and 930 pairs
THEMES = ("full", "open", "none")
TRAIN = "toy_pairs_cot_train"
# Test sets of equal size: one for each kind of theme, and one whose No pairs have a broken panel.
WEAK_TEST = "toy_pairs_weak_test"
THEME_OF = {f"toy_pairs_{theme}_test": theme for theme in THEMES}
TESTS = (*THEME_OF, WEAK_TEST)
BROKEN = {TRAIN: 4, WEAK_TEST: 1}  # one No pair of so many has a broken panel
BROKEN_STEPS = 6  # of the denoising that ends early
# Grids of broken panels: of each size and number of steps, and of blanks. Twice as many are merged.
BROKEN_GRIDS = 24


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
            is_open = i % 4 >= 4 * (1 - open_share)
            if is_open:
                character = world.opened(character, PROMPT_OPENINGS[i // 4 % len(PROMPT_OPENINGS)])
            prompt_kind = "open prompt" if is_open else "full prompt"
            row = {
                "idx": f"{split}-{i:04d}",
                "prompt": world.grid_prompt(character, _four_views(rng)),
                "layout": "2x2",
                "theme": world.theme(character),
                "task_name": "shapes",
                "open": is_open,  # read by between_images
                "category": f"{prompt_kind}, {world.KINDS[is_held_out]}",
            }
            rows.append(row)
        write_json_lines(out / f"{split}_metadata.jsonl", rows)


def build_prompt_sets(out: Path, seed: int) -> None:
    """``prompts`` for training and its evaluations; ``open_prompts`` for w and b."""
    build_prompts(out / "prompts", seed)
    build_prompts(out / "open_prompts", seed, train=4, test=24, open_share=1.0)


def _random_panel(character: world.Character, side: int, rng: np.random.Generator) -> np.ndarray:
    view = world.VIEWS[rng.integers(len(world.VIEWS))]
    return world.render_panel(character, view, side, world.random_jitter(rng))


def build_rank_benchmark(out: Path, seed: int, items: int = 160) -> None:
    """A benchmark in ConsistencyRank-Bench's format.

    An item's candidates differ from its reference in 0, 1, 2 and 3 attributes.
    """
    rng = np.random.default_rng([seed, 30])
    prompts = []
    ranks = []
    for i in range(items):
        folder = f"{i:04d}"
        reference = world.CHARACTERS[rng.choice(world.HELD_OUT)]
        images = out / "images" / folder
        images.mkdir(parents=True, exist_ok=True)
        world.to_image(_random_panel(reference, 64, rng), rng).save(images / "ref.png")
        ranked = [f"{number}.png" for number in rng.permutation(4)]
        candidates = [reference]
        for attribute in rng.permutation(list(world.ATTRIBUTES)):
            candidates.append(world.changed(candidates[-1], attribute, rng))
        for candidate, name in zip(candidates, ranked, strict=True):
            world.to_image(_random_panel(candidate, 64, rng), rng).save(images / name)
        prompt = {
            "idx": folder,
            "prompt": f"Two views of {world.with_article(reference)}.",
            "criteria": CRITERIA,
        }
        rank = {
            "folder": folder,
            "ref_image": "ref.png",
            "comp_images": sorted(ranked),
            "rank_images": ranked,
        }
        prompts.append(prompt)
        ranks.append(rank)
    write_json_lines(out / "prompt_data.jsonl", prompts)
    write_json_lines(out / "consistency_full_rank.jsonl", ranks)


def _another(character: int, pool: Container[int], rng: np.random.Generator) -> int:
    """Another character of the pool, mostly one that differs in one attribute."""
    while True:
        other = world.departed(character, rng, one_attribute=0.8)
        if other in pool:
            return other


def draw(out: Path, seed: int, prompts: dict[str, int] = PROMPTS) -> None:
    """Grids as inconsistent as a generator's.

    Two of a prompt's four grids show another character, and single panels depart. So two panels may
    agree on a character that the theme does not name. Training grids show only training characters,
    and test prompts name held-out ones.
    """
    lines = []
    characters_drawn: dict[str, list[list[int]]] = {}  # prompt -> grid -> panel -> character
    for split, count in prompts.items():
        if split == "test":
            rng = np.random.default_rng([seed, 21])
            anchors = world.HELD_OUT
            pool: Container[int] = range(len(world.CHARACTERS))
        else:
            rng = np.random.default_rng([seed, 20])
            anchors = world.KNOWN
            pool = world.KNOWN
        for number in range(count):
            idx = f"{split}-{number:04d}"
            folder = out / "grids" / idx
            folder.mkdir(parents=True, exist_ok=True)
            named = anchors[number % len(anchors)]
            other = _another(named, pool, rng)
            views = _four_views(rng)
            side = PANEL_SIDES[number // len(anchors) % len(PANEL_SIDES)]
            characters_drawn[idx] = []
            order = rng.permutation([named, named, other, other]).tolist()
            for generation, character in enumerate(order):
                panels = [character] * 4
                for panel in np.flatnonzero(rng.random(4) < DEPARTURES):
                    panels[panel] = _another(character, pool, rng)
                grid = world.render_grid([world.CHARACTERS[c] for c in panels], views, side, rng)
                image = world.to_image(grid, rng)
                image.save(folder / f"{generation}.png", compress_level=1)
                characters_drawn[idx].append(panels)
            prompt = world.grid_prompt(world.CHARACTERS[named], views)
            lines.append({"idx": idx, "prompt": prompt, "split": split})
    write_json_lines(out / "metadata.jsonl", lines)
    write_json(out / "drawn.json", characters_drawn)


def verdict(first: world.Character | None, second: world.Character | None) -> str:
    """The judge's answer on a pair, with its reason. None: the panel is broken."""
    if first == second and first is not None:
        return f"Yes. Both show {world.with_article(first)}."
    first_text = "nothing clear" if first is None else world.with_article(first)
    second_text = "nothing clear" if second is None else world.with_article(second)
    return f"No. First {first_text}, second {second_text}."


def _num_differences(first: world.Character, second: world.Character) -> int:
    return sum(getattr(first, name) != getattr(second, name) for name in world.ATTRIBUTES)


def annotate(out: Path, sets: Path) -> tuple[int, int]:
    """Ranks the sets of ``sets.jsonl`` by the characters shown.

    It also writes a reason for each of their pairs. A set is left out unless its best candidate
    shows the reference's character and its worst does not.

    Returns:
        The numbers of rankings and of sets.
    """
    characters_drawn = read_json(out / "drawn.json")
    rng = np.random.default_rng(len(characters_drawn))
    rows = read_json_lines(sets)
    rankings = []
    reasons = {}  # a pair that is in several sets keeps the reason that was written last
    for row in rows:
        folder = row["folder"]
        shown = {}
        for name in (row["ref_image"], *row["comp_images"]):
            generation, panel = name.removesuffix(".png").split("/")
            shown[name] = world.CHARACTERS[characters_drawn[folder][int(generation)][int(panel)]]
        reference = shown[row["ref_image"]]
        differences = {name: _num_differences(c, reference) for name, c in shown.items()}
        ranked = sorted(row["comp_images"], key=differences.__getitem__)
        if differences[ranked[0]] > 0 or differences[ranked[-1]] == 0:
            continue
        rankings.append({**row, "rank_images": ranked})
        for name in ranked:
            images = (row["ref_image"], name)[:: rng.choice([-1, 1])]
            reason = verdict(shown[images[0]], shown[images[1]])
            key = (folder, *sorted(images))
            reasons[key] = {"folder": folder, "images": images, "reason": reason}
    write_json_lines(out / "rankings.jsonl", rankings)
    write_json_lines(out / "reasons.jsonl", reasons.values())
    return len(rankings), len(rows)


def _unfinished(seed: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Grids (2S, 2S, 3) in [0, 1] whose denoising ends after two, three or four of its steps."""
    import torch
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(FLUX, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    grids: list[np.ndarray] = []
    for size, last_step in itertools.product((32, 64), (1, 2, 3)):

        def stop_early(
            pipe: FluxPipeline, step: int, timestep: object, tensors: dict, last: int = last_step
        ) -> dict:
            pipe._interrupt = step >= last  # diffusers' way to stop a pipeline
            return tensors

        characters = rng.integers(len(world.CHARACTERS), size=BROKEN_GRIDS)
        prompts = [world.grid_prompt(world.CHARACTERS[c], _four_views(rng)) for c in characters]
        output = pipe(
            prompts,
            height=size,
            width=size,
            num_inference_steps=BROKEN_STEPS,
            guidance_scale=3.5,
            generator=generator,
            callback_on_step_end=stop_early,
            max_sequence_length=pipe.tokenizer_2.model_max_length,
            output_type="np",
        )
        grids.extend(output.images)
    return grids


def _merged(side: int, rng: np.random.Generator) -> np.ndarray:
    """Two characters on top of each other."""
    characters = rng.choice(len(world.CHARACTERS), size=2, replace=False)
    first, second = [_random_panel(world.CHARACTERS[c], side, rng) for c in characters]
    if rng.random() < 0.5:
        return np.minimum(first, second)
    return (first + second) / 2


def _blank(side: int, rng: np.random.Generator) -> np.ndarray:
    """A panel of one color, mostly white."""
    color = 1.0 if rng.random() < 0.6 else rng.random(3)
    return np.ones((side, side, 3)) * color


def broken_panels(seed: int) -> list[Image.Image]:
    """Panels that the oracle calls invalid.

    A judge that was trained without them gives them a high score, and RL finds that.
    """
    rng = np.random.default_rng([seed, 40])
    images = [world.to_image(grid) for grid in _unfinished(seed, rng)]
    for draw_panel in (_blank, _merged, _merged):
        for number in range(BROKEN_GRIDS):
            panels = [draw_panel(PANEL_SIDES[number % 3], rng) for _ in range(4)]
            images.append(world.to_image(world.assemble_grid(panels), rng))
    broken = []
    for image, valid in zip(images, read_grids(images).valid, strict=True):
        side = image.width // 2
        for panel in np.flatnonzero(~valid):
            row, column = divmod(int(panel), 2)
            left = column * side
            top = row * side
            broken.append(image.crop((left, top, left + side, top + side)))
    return broken


def finish(out: Path, data: Path, seed: int) -> None:
    """Sets the questions of the pairs in ``data``, breaks panels, divides the test pairs."""
    broken = []  # file names, relative to ``data``
    (data / "images" / "broken").mkdir(parents=True, exist_ok=True)
    for number, panel in enumerate(broken_panels(seed)):
        name = f"images/broken/{number:04d}.png"
        panel.save(data / name, compress_level=1)
        broken.append(name)
    prompts = read_json_lines(out / "metadata.jsonl")
    characters = {prompt["idx"]: read_prompt(prompt["prompt"]) for prompt in prompts}

    sets: dict[str, list[dict]] = {name: [] for name in (TRAIN, *TESTS)}
    for split, targets in (("train", (TRAIN,)), ("test", TESTS)):
        is_test = split == "test"
        rng = np.random.default_rng([seed, 50, int(is_test)])
        # Every fourth block of 16 broken panels is for the tests.
        panels = []
        for number, name in enumerate(broken):
            if (number // 16 % 4 == 0) == is_test:
                panels.append(name)
        file = data / f"toy_pairs_cot_{split}.json"
        pairs = read_json(file)
        file.unlink()
        for label in ("Yes", "No"):
            labeled = [pair for pair in pairs if pair["messages"][1]["content"].startswith(label)]
            num_full_rounds = len(labeled) // len(targets)
            for number, pair in enumerate(labeled[: num_full_rounds * len(targets)]):
                target = targets[number % len(targets)]
                theme_in_turn = THEMES[number // len(targets) % len(THEMES)]
                theme = THEME_OF.get(target, theme_in_turn)
                character = characters[Path(pair["images"][0]).parts[1]]
                _set_question(pair, character, theme, rng)
                if label == "No" and target in BROKEN and number % BROKEN[target] == 0:
                    _break_panels(pair, panels, rng)
                sets[target].append(pair)

    rng = np.random.default_rng([seed, 51])
    for name, pairs in sets.items():
        rng.shuffle(pairs)  # else all Yes come first
        write_json(data / f"{name}.json", pairs)
    file = data / "dataset_info.json"
    entry = read_json(file)[TRAIN]
    info = {name: entry | {"file_name": f"{name}.json"} for name in sets}
    write_json(file, info)


def _set_question(
    pair: dict, character: world.Character, theme: str, rng: np.random.Generator
) -> None:
    """Asks about the pair with a theme of one of ``THEMES``, which names the character."""
    if theme == "open":
        character = world.opened(character, world.OPENINGS[rng.integers(len(world.OPENINGS))])
    if theme == "none":
        text = load_question("pair").text()
    else:
        text = theme_question(world.theme(character))
    pair["messages"][0]["content"] = pair_prefix(DEFAULT_FORM) + text


def _break_panels(pair: dict, panels: list[str], rng: np.random.Generator) -> None:
    """Puts a broken panel in the place of the first image, the second, or both.

    The answer changes as well.
    """
    texts = re.findall(r"(?:First|second) an? ([a-z ]+)", pair["messages"][1]["content"])
    shown: list[world.Character | None] = [world.Character(*text.split()) for text in texts]
    start = int(rng.integers(len(panels)))
    for place in ((0,), (1,), (0, 1))[rng.integers(3)]:
        pair["images"][place] = panels[(start + place) % len(panels)]
        shown[place] = None
    pair["messages"][1]["content"] = verdict(*shown)


def main() -> None:
    """The command."""
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
    arguments = parser.parse_args()
    out = arguments.out
    seed = arguments.seed
    drawn = out / "drawn"
    reward_data = out / "reward_data"
    if arguments.command == "world":
        build_prompt_sets(out, seed)
        build_rank_benchmark(out / "ConsistencyRank-Bench", seed)
        draw(drawn, seed)
    elif arguments.command == "annotate":
        ranked, sets = annotate(drawn, reward_data / "sets.jsonl")
        print(f"{ranked} of {sets} sets ranked (the others have no clear best or worst)")
    elif arguments.command == "finish":
        finish(drawn, reward_data, seed)
    else:
        build_edits(out, seed)


if __name__ == "__main__":
    main()
