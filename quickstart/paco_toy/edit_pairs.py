"""The data of a judge of edits: scenes, what was made of them, and the two questions of `consistency_for_editing`.

    python -m paco_toy.edit_pairs --out DIR [--seed N]

DIR/toy_edits_train.json, toy_edits_kept_test.json, toy_edits_followed_test.json, dataset_info.json, images/
DIR/base/: the toy judge's base, changed to see the four panels of a scene

Edits are right or fail as editors do (OUTCOMES). Test edits result in held-out characters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paco_judge.questions import load_editing_questions
from paco_reward.pairing.outputs import write_datasets
from paco_reward.pairing.records import LabeledPair
from paco_toy.broken import blank, merged
from paco_toy.edits import IMAGE_SIDE, Edit, draw_scene, random_edit
from paco_toy.reward_data import roughened
from paco_toy.world import (
    ATTRIBUTES,
    VIEWS,
    Character,
    View,
    assemble_grid,
    random_jitter,
    render_panel,
    split_characters,
)

# What became of an edit -> share. The instruction is followed in about half of them, and the rest kept in about half.
OUTCOMES = {
    "right": 0.25, "untouched": 0.1, "other value": 0.2, "other panel": 0.15, "one more panel": 0.15, "moved": 0.08, "broken": 0.07,
}  # fmt: skip
SIDES = (32, 64)  # pixels of an edited image's panel
BASE_SIDE = 112  # pixels: four panels, each as large as those that the toy judge's base has seen
TRAIN, TESTS = "toy_edits_train", {"editing_consistency": "toy_edits_kept_test", "editing_instruction": "toy_edits_followed_test"}
COUNTS = {"train": 2500, "test": 400}  # edits; each is asked about twice


@dataclass(frozen=True)
class Panel:
    """What an edited image shows in one place; a broken panel shows nothing clear."""

    character: Character
    view: View
    broken: bool = False


def _other_value(character: Character, attribute: str, but: str, rng: np.random.Generator) -> Character:
    """The character with another value of an attribute, which is not ``but``."""
    values = [v for v in ATTRIBUTES[attribute] if v not in (getattr(character, attribute), but)]
    return dataclasses.replace(character, **{attribute: str(rng.choice(values))})


def attempt(edit: Edit, outcome: str, rng: np.random.Generator) -> list[Panel]:
    """The four panels that an editor made of an edit."""
    panels = [Panel(c, v) for c, v in zip(edit.characters, edit.views, strict=True)]
    elsewhere, anywhere = int(rng.choice([p for p in range(4) if p != edit.place])), int(rng.integers(4))
    if outcome in ("right", "one more panel", "moved", "broken"):
        panels[edit.place] = Panel(edit.result, edit.views[edit.place])
    if outcome == "other value":
        wrong = _other_value(edit.characters[edit.place], edit.attribute, edit.value, rng)
        panels[edit.place] = Panel(wrong, edit.views[edit.place])
    if outcome in ("other panel", "one more panel"):
        shown = edit.characters[elsewhere]
        changed = dataclasses.replace(shown, **{edit.attribute: edit.value})
        if outcome == "one more panel" or changed == shown:
            changed = _other_value(shown, str(rng.choice(list(ATTRIBUTES))), "", rng)
        panels[elsewhere] = Panel(changed, edit.views[elsewhere])
    if outcome == "moved":
        views = [v for v in VIEWS if v != edit.views[anywhere]]
        panels[anywhere] = dataclasses.replace(panels[anywhere], view=views[rng.integers(len(views))])
    if outcome == "broken":
        panels[anywhere] = dataclasses.replace(panels[anywhere], broken=True)
    return panels


def answers(edit: Edit, panels: Sequence[Panel]) -> dict[str, str]:
    """Question -> the answer that is right, as paco_toy.edit_oracle measures, with a reason that describes a panel in both images."""
    made, value = panels[edit.place], getattr(panels[edit.place].character, edit.attribute)
    expected = dataclasses.replace(edit.result, **{edit.attribute: value})  # whether it was followed is the other question
    wanted = [expected if place == edit.place else shown for place, shown in enumerate(edit.characters)]
    changed = [
        place
        for place, (panel, character, view) in enumerate(zip(panels, wanted, edit.views, strict=True))
        if panel != Panel(character, view)
    ]

    def described(place: int) -> str:
        panel = panels[place]
        after = "nothing clear" if panel.broken else f"a {panel.character}"
        moved = ", moved" if panel.view != edit.views[place] else ""
        return f"First a {edit.characters[place]}, second {after}{moved}."

    followed = not made.broken and made.character.shape == edit.result.shape and value == edit.value
    return {
        "editing_consistency": f"No. {described(changed[0])}" if changed else "Yes. The rest is the same.",
        "editing_instruction": f"{'Yes' if followed else 'No'}. {described(edit.place)}",
    }


def write(out: Path, seed: int, counts: dict[str, int]) -> None:
    """The data sets, with their images."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    known, held_out = split_characters()
    questions = load_editing_questions()
    datasets: dict[str, list[LabeledPair]] = {TRAIN: []} | {name: [] for name in TESTS.values()}
    for split, count in counts.items():
        rng = np.random.default_rng([seed, 60, split == "test"])
        for number in range(count):
            edit = random_edit(rng, known, known if split == "train" else held_out)
            panels = attempt(edit, str(rng.choice(list(OUTCOMES), p=list(OUTCOMES.values()))), rng)
            jitters, side = [random_jitter(rng) for _ in range(4)], int(rng.choice(SIDES))
            drawn = [render_panel(p.character, p.view, side, j) for p, j in zip(panels, jitters, strict=True)]
            for place, panel in enumerate(panels):
                if panel.broken:
                    drawn[place] = (blank, merged)[rng.integers(2)](side, rng)
            names = [f"images/{split}-{number:04d}-{when}.png" for when in ("before", "after")]
            draw_scene(edit.characters, edit.views, IMAGE_SIDE, jitters).save(out / names[0], compress_level=1)
            roughened(assemble_grid(drawn), rng).save(out / names[1], compress_level=1)
            right = answers(edit, panels)
            for question in questions:
                name = TRAIN if split == "train" else TESTS[question.name]
                text, answer = question.text(instruction=edit.instruction), right[question.name]
                pair = LabeledPair(*names, text, answer.startswith("Yes"), question.name, group=names[0], reason=answer)
                datasets[name].append(pair)
    write_datasets(out, datasets)


def write_base(judge: Path, out: Path) -> None:
    """A copy of the toy judge's base that makes every image BASE_SIDE pixels square, and whose vision tower looks at each panel
    by itself: it has only seen single panels."""
    shutil.copytree(judge, out, dirs_exist_ok=True)

    def change(name: str, edit: Callable[[dict], None]) -> None:
        config = json.loads((out / name).read_text(encoding="utf-8"))
        edit(config)
        (out / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def enlarge(config: dict) -> None:
        for name in ("image_processor", "video_processor"):
            config[name]["size"] = dict.fromkeys(config[name]["size"], BASE_SIDE**2)

    change("processor_config.json", enlarge)
    change("config.json", lambda config: config["vision_config"].update(window_size=BASE_SIDE // 2, fullatt_block_indexes=[]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judge", type=Path, required=True, help="the toy judge's base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed, COUNTS)
    write_base(arguments.judge, arguments.out / "base")
    print(f"{sum(COUNTS.values())} edits written to {arguments.out}")


if __name__ == "__main__":
    main()
