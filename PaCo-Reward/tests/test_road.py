"""From images to the training file: pairing and split, with nothing twice.

Every prompt, theme, image, edit, instruction and answer of the judge is another one, except two
prompts that share a theme, and images that must stay on one side of the split. So whatever is
exchanged, repeated or left out changes a label or a side.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from pairing_tools import (
    SIDE,
    build,
    digest,
    judge_model,
    noise,
    p_yes_of,
    read_lines,
    rows,
    write_lines,
)
from PIL import Image

from paco_judge.questions import theme_question
from paco_reward.datasets import labeled_pairs


def clear_rankings(output: Path, world: Path, model: str) -> list[tuple[str, str, str, str]]:
    """(question, reference, best, worst) of the sets whose scores differ enough.

    From the grids, the sets and the judge; panels by their digests.
    """
    prompts = {line["idx"]: line["prompt"] for line in read_lines(world / "metadata.jsonl")}
    rankings = []
    for candidates in read_lines(output / "sets.jsonl"):
        idx = candidates["folder"]
        question = theme_question(prompts[idx].split(". [LEFT]")[0] + ".")
        panels = []
        numbers = []
        for name in (candidates["ref_image"], *candidates["comp_images"]):
            generation, number = (int(text) for text in name.removesuffix(".png").split("/"))
            grid = Image.open(world / "grids" / idx / f"{generation}.png")
            panels.append(digest(grid.crop((SIDE * number, 0, SIDE * (number + 1), SIDE))))
            numbers.append(number)
        assert len(set(numbers[1:])) == 1 and numbers[0] != numbers[1]
        reference, *others = panels
        scores = {}
        for other in others:
            scores[other] = p_yes_of(reference, other, question, model)
        best, *_, worst = sorted(scores, key=scores.get, reverse=True)
        if scores[best] - scores[worst] >= 0.1:
            rankings.append((question, reference, best, worst))
    return rankings


def expected_labels(output: Path, world: Path, model: str) -> dict[frozenset, tuple[bool, str]]:
    """Label and question by the digests of two panels."""
    votes: Counter[tuple[frozenset, str]] = Counter()
    for question, reference, best, worst in clear_rankings(output, world, model):
        votes[frozenset((reference, best)), question] += 1
        votes[frozenset((reference, worst)), question] -= 1
    return {pair: (vote > 0, question) for (pair, question), vote in votes.items() if vote}


SETTING = {"duplicate_bits": 0, "answer_tokens": "exact"}


@pytest.fixture(scope="module")
def built(world, tmp_path_factory) -> Path:
    """A data set with reasons, labeled by ``judge_model`` as judge-a."""
    output = tmp_path_factory.mktemp("built") / "out"
    with fake_judge.FakeJudge(judge_model, models=("judge-a",)) as server:
        judge = {"server": server.url, "model": "judge-a"}
        stats = build(world, output, **judge, **SETTING, reasons=True)
    groups = {name: numbers["groups"] for name, numbers in stats["datasets"].items()}
    assert groups == {"consistency_reward_cot_train": 3, "consistency_reward_cot_test": 2}
    return output


def shown(output: Path, row: dict) -> list[str]:
    return [digest(Image.open(output / image)) for image in row["images"]]


def test_labels_are_the_judges_about_reference_and_candidate(built, world):
    """Whatever the order of the two images in the training file, of which both occur."""
    expected = expected_labels(built, world, "judge-a")
    stats = json.loads((built / "stats.json").read_text())["consistency_reward"]
    assert stats["counts"]["rankings_used"] == len(clear_rankings(built, world, "judge-a"))
    orders = []
    for part in ("train", "test"):
        found = rows(built, f"consistency_reward_cot_{part}")
        verdicts = [row["messages"][1]["content"].split(".")[0] for row in found]
        assert verdicts.count("Yes") == verdicts.count("No") > 0
        for row, verdict in zip(found, verdicts, strict=True):
            images = shown(built, row)
            label, question = expected[frozenset(images)]
            assert verdict == ("Yes" if label else "No")
            assert row["messages"][0]["content"] == f"<image><image>{question}"
            assert images[1][:6] in row["messages"][1]["content"]  # as the writer was shown them
            orders.append(row["images"] == sorted(row["images"]))
    assert {True, False} <= set(orders) and 0.2 < np.mean(orders) < 0.8


def test_accuracy_reads_the_verdict_and_not_the_reasons(built, world):
    expected = expected_labels(built, world, "judge-a")
    pairs, labels = labeled_pairs(built, "consistency_reward_cot_train")
    learned = rows(built, "consistency_reward_cot_train")
    for pair, label, row in zip(pairs, labels, learned, strict=True):
        images = [digest(pair.image_a), digest(pair.image_b)]
        assert images == shown(built, row)
        assert (label, pair.question) == expected[frozenset(images)]


def test_prompts_of_one_theme_are_on_one_side(world, tmp_path):
    sides = []
    with fake_judge.FakeJudge(judge_model, models=("judge-a",)) as server:
        judge = {"server": server.url, "model": "judge-a"}
        for seed in range(6):
            build(world, tmp_path / str(seed), **judge, **SETTING, seed=seed)
            parts = {}
            for part in ("train", "test"):
                learned = rows(tmp_path / str(seed), f"consistency_reward_{part}")
                parts[part] = {Path(row["images"][0]).parts[1] for row in learned}
                assert parts[part]
            assert not parts["train"] & parts["test"]
            pair = {"p0", "p1"}  # the prompts of the first theme
            assert not (parts["train"] & pair and parts["test"] & pair)
            sides.append(bool(parts["test"] & pair))
    assert len(set(sides)) == 2  # some seeds test the theme, and others train on it


def test_another_judge_is_asked_again(world, tmp_path):
    """Its answers are not those of the judge that was asked before into the same folder."""
    asked = []
    with fake_judge.FakeJudge(judge_model, models=("judge-a", "judge-b")) as server:
        for model, image_format in (("a", "png"), ("b", "png"), ("b", "jpeg"), ("a", "png")):
            judge = {"server": server.url, "model": f"judge-{model}", "image_format": image_format}
            build(world, tmp_path, **judge, **SETTING)
            asked.append(len(server.requests))
    assert asked == [asked[0], 2 * asked[0], 3 * asked[0], 3 * asked[0]]


def near(image: Image.Image) -> Image.Image:
    """A copy that differs in one pixel."""
    changed = np.array(image)
    changed[0, 0] = 255 - changed[0, 0]
    return Image.fromarray(changed)


@pytest.mark.parametrize(
    ("option", "name"), [("editing", "sharegpt_editing"), ("pairs", "consistency_reward")]
)
def test_near_duplicates_are_on_one_side(option, name, tmp_path):
    """Two sources that differ in one pixel, each with an edit of its own, and labels of both."""
    lines = []
    family_of = {}
    for number in range(20):
        family = number // 2
        source = noise(1, family)
        image = near(source) if number % 2 else source
        family_of[digest(image)] = family
        image.save(tmp_path / f"source{number}.png")
        noise(2, number).save(tmp_path / f"edited{number}.png")
        names = (f"source{number}.png", f"edited{number}.png")
        label = number % 4 < 2
        if option == "editing":
            line = {"instruction": f"make it {number}", "consistency": label}
            lines.append(line | dict(zip(("source", "edited"), names)))
        else:
            line = {"theme": f"theme {number}", "label": label}
            lines.append(line | dict(zip(("image2", "image1"), names)))
    file = write_lines(tmp_path / "lines.jsonl", lines)
    options = {option: file, "sets_per_prompt": None, "test_share": 0.4}
    for seed in range(4):
        output = tmp_path / str(seed)
        build(None, output, **options, seed=seed)
        sides = {}
        for part in ("train", "test"):
            sides[part] = set()
            for row in rows(output, f"{name}_{part}"):
                sides[part] |= {family_of.get(image) for image in shown(output, row)} - {None}
        assert sides["train"] and sides["test"] and not sides["train"] & sides["test"]
