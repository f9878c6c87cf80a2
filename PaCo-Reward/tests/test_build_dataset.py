"""`paco-reward build-dataset`, whole runs: from images to the training file, and after a kill.

Every prompt, theme, image, edit, instruction and answer of the judge is another one, except two
prompts that share a theme. So whatever is exchanged, repeated or left out changes a label or a side.
"""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from pairing_tools import (
    SIDE,
    all_bytes,
    build,
    digest,
    judge_model,
    noise,
    p_yes_of,
    rank_like_people,
    read_lines,
    rows,
    write_lines,
)
from PIL import Image

from paco_judge.errors import UserError
from paco_judge.images import load_image
from paco_judge.questions import EDITING, RequestForm, theme_question
from paco_reward.datasets import labeled_pairs, load_examples


def test_a_users_question_is_asked_and_learned(world, tmp_path):
    """Training data, accuracy and the server share wording and labels."""
    (tmp_path / "mine.txt").write_text("Same {theme}?")
    setting = {"question": tmp_path / "mine.txt", "image_labels": "<img{n}>: "}
    with fake_judge.FakeJudge(judge_model) as server:
        build(world, tmp_path / "out", server=server.url, **setting)
        content = server.requests[0]["messages"][0]["content"]
    texts = [part.get("text", "image") for part in content]
    assert texts[:4] == ["<img1>: ", "image", "<img2>: ", "image"]
    assert texts[4].startswith("Same a 1x3 grid of")
    name = "consistency_reward_train"
    learned = {row["messages"][0]["content"] for row in rows(tmp_path / "out", name)}
    pairs, _ = labeled_pairs(tmp_path / "out", name, form=RequestForm("<img{n}>: "))
    assert {f"<img1>: <image><img2>: <image>{pair.question}" for pair in pairs} == learned
    with pytest.raises(UserError, match="--image_labels"):
        labeled_pairs(tmp_path / "out", name)


@pytest.fixture(scope="module")
def edits(tmp_path_factory) -> Path:
    """bare.jsonl of 12 edits, and edits.jsonl with both labels of each."""
    folder = tmp_path_factory.mktemp("edits")
    bare = []
    labeled = []
    for number in range(12):
        line = {"instruction": f"make it {number}"}
        for seed, side in enumerate(("source", "edited"), start=10):
            line[side] = str(folder / f"{side}{number}.png")
            noise(seed, number).save(line[side])
        bare.append(line)
        is_odd = number % 2 == 1
        labeled.append(line | {"consistency": "Yes" if is_odd else "No", "follows": not is_odd})
    write_lines(folder / "bare.jsonl", bare)
    write_lines(folder / "edits.jsonl", labeled)
    return folder


def edit_of(text: str) -> int:
    """The number of the edit that a question is about."""
    return int(text.split("make it ")[1].split('"')[0])


def test_labeled_edits(edits, tmp_path):
    build(None, tmp_path, editing=edits / "edits.jsonl", test_share=0.3, duplicate_bits=0)
    sides = {}
    for part in ("train", "test"):
        examples = load_examples(tmp_path, f"sharegpt_editing_{part}")
        sides[part] = set()
        counts = Counter()
        for example in examples:
            sides[part] |= set(example.images)
            is_consistency = "stay consistent" in example.prompt
            is_odd = edit_of(example.prompt) % 2 == 1
            assert example.label == (is_odd if is_consistency else not is_odd)
            counts[is_consistency, example.label] += 1
        for kind in (True, False):
            assert counts[kind, True] == counts[kind, False] > 0
    assert not sides["train"] & sides["test"]


@pytest.mark.parametrize("question", [*EDITING, "mine.txt"])
def test_a_single_question_about_edits_has_its_own_labels(edits, tmp_path, question):
    """One of the user's own is about the whole edit."""
    (tmp_path / "mine.txt").write_text("Is {instruction} done, and nothing else?")
    lines = read_lines(edits / "edits.jsonl")
    expected = {}
    for number, line in enumerate(lines):
        line["follows"] = number % 3 > 0
        labels = {"editing_consistency": number % 2 == 1, "editing_instruction": line["follows"]}
        expected[number] = labels.get(question, all(labels.values()))
    file = write_lines(tmp_path / "edits.jsonl", lines)
    name = question if question in EDITING else tmp_path / question
    setting = {"editing": file, "editing_question": name, "test_share": 0.0, "duplicate_bits": 0}
    build(None, tmp_path / "out", **setting)
    examples = load_examples(tmp_path / "out", "sharegpt_editing_train")
    found = {example.label for example in examples}
    for example in examples:
        number = int(re.search(r"make it (\d+)", example.prompt)[1])
        assert example.label == expected[number]
    assert found == {True, False}


def test_edits_labeled_by_a_judge_are_asked_once(edits, tmp_path):
    """About the source and then its edit; each answer has its own reason."""
    setting = {"editing": edits / "bare.jsonl", "duplicate_bits": 0, "min_gap": 0.2}
    with fake_judge.FakeJudge(judge_model, models=["judge-a"]) as server:
        setting |= {"server": server.url, "model": "judge-a", "test_share": 0.0, "reasons": True}
        stats = build(None, tmp_path, **setting)
        assert build(None, tmp_path, **setting) == stats
        (numbers,) = stats["datasets"].values()
        assert len(server.requests) == 24 + numbers["pairs"]
    assert {request["max_tokens"] for request in server.requests} == {1, 256}
    unclear = 0
    for request in server.requests[:24]:
        images, question = fake_judge.request_content(request)
        unclear += abs(p_yes_of(*map(digest, images), question, "judge-a") - 0.5) < 0.1
    assert stats["counts"]["editing_unclear"] == unclear > 0
    examples = load_examples(tmp_path, "sharegpt_editing_cot_train")
    assert examples
    for example in examples:
        question = example.prompt.removeprefix("<image><image>")
        images = [digest(load_image(image)) for image in example.images]
        p_yes = p_yes_of(*images, question, "judge-a")
        assert abs(p_yes - 0.5) >= 0.1 and example.label == (p_yes > 0.5)
        source = load_image(edits / f"source{edit_of(question)}.png")
        assert images[0] == digest(source)


def test_a_run_is_determined_by_its_seed_and_resumes_without_loss_or_repetition(world, tmp_path):
    output = tmp_path / "out"
    with fake_judge.FakeJudge(judge_model) as server:
        setting = {"server": server.url, "reasons": True}
        stats = build(world, output, **setting)
        needed = len(server.requests)
        whole = all_bytes(output)
        for name in ("scores", "reasons"):
            journal = output / "work" / f"{name}.jsonl"
            content = journal.read_bytes()
            journal.write_bytes(content[: len(content) // 2])  # cut off in a line
        min((output / "images").rglob("*.png")).unlink()  # the first panel of a grid
        build(world, output, **setting)
        done = len(server.requests)
        assert needed < done < 2 * needed and all_bytes(output) == whole
        build(world, output, **setting)
        assert len(server.requests) == done
        build(world, tmp_path / "other", seed=1, **setting)
    chosen = {}  # by seed and prompt
    for folder in (output, tmp_path / "other"):
        for line in read_lines(folder / "sets.jsonl"):
            chosen.setdefault((folder, line.pop("folder")), []).append(line)
    assert len({json.dumps(sets) for sets in chosen.values()}) == len(chosen)
    assert stats["counts"]["reasons_kept"] == sum(n["pairs"] for n in stats["datasets"].values())


def test_data_sets_of_other_inputs_stay_and_are_not_made_from_exchanged_ones(
    world, edits, tmp_path
):
    """Other instructions are another data set."""
    build(world, tmp_path / "out", sets_only=True)
    ranked = rank_like_people(tmp_path / "out")
    build(world, tmp_path / "out", rankings=ranked)
    for share in (0.3, 0.0):  # of which only the second has no test set
        build(None, tmp_path / "out", editing=edits / "edits.jsonl", test_share=share)
    index = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    names = ["consistency_reward_train", "consistency_reward_test", "sharegpt_editing_train"]
    assert list(index) == names
    whole = all_bytes(tmp_path / "out")
    lines = read_lines(edits / "edits.jsonl")
    lines[0]["instruction"] = "another"
    file = write_lines(tmp_path / "changed.jsonl", lines)
    with pytest.raises(UserError, match="sharegpt_editing.*choose another --output, or"):
        build(None, tmp_path / "out", editing=file, name="other")  # which names no edits
    assert all_bytes(tmp_path / "out") == whole


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
        if scores[best] - scores[worst] >= SETTING["min_gap"]:
            rankings.append((question, reference, best, worst))
    return rankings


def expected_labels(output: Path, world: Path, model: str) -> dict[frozenset, tuple[bool, str]]:
    """Label and question by the digests of two panels."""
    votes: Counter[tuple[frozenset, str]] = Counter()
    for question, reference, best, worst in clear_rankings(output, world, model):
        votes[frozenset((reference, best)), question] += 1
        votes[frozenset((reference, worst)), question] -= 1
    return {pair: (vote > 0, question) for (pair, question), vote in votes.items() if vote}


SETTING = {"duplicate_bits": 0, "answer_tokens": "exact", "min_gap": 0.25}


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
        learned = rows(built, f"consistency_reward_cot_{part}")
        pairs, labels = labeled_pairs(built, f"consistency_reward_cot_{part}")
        assert labels.count(True) == labels.count(False) > 0
        for row, pair, label in zip(learned, pairs, labels, strict=True):
            images = shown(built, row)
            question, answer = (message["content"] for message in row["messages"])
            assert (label, pair.question) == expected[frozenset(images)]
            assert images == [digest(pair.image_a), digest(pair.image_b)]
            assert question == f"<image><image>{pair.question}"
            assert answer.startswith("Yes. " if label else "No. ")  # its reasons say both words
            assert images[1][:6] in answer  # as the writer was shown them
            orders.append(row["images"] == sorted(row["images"]))
    assert {True, False} <= set(orders) and 0.2 < np.mean(orders) < 0.8


def test_answers_of_a_judge_exchanged_under_its_name(world, tmp_path):
    """They are not mixed with the new one's; unknown ones only if the user says so."""
    with fake_judge.FakeJudge(judge_model, models=("judge-a",)) as server:
        setting = {"server": server.url, "model": "judge-a"} | SETTING
        server.identities = {"judge-a": None}
        build(world, tmp_path, **setting)
        first = len(server.requests)
        with pytest.raises(UserError, match="scores.jsonl has answers .* is unknown"):
            build(world, tmp_path, **setting)
        build(world, tmp_path, **setting, continue_unknown=True)
        assert len(server.requests) == first
        (tmp_path / "work" / "scores.jsonl").unlink()
        for number, image_format, requests in (
            (1, "png", 2),
            (2, "png", 3),
            (2, "jpeg", 4),
            (1, "png", 4),
        ):
            server.identities = {"judge-a": f"o/a@{number}"}
            build(world, tmp_path, **setting, image_format=image_format)
            assert len(server.requests) == requests * first


def test_what_an_earlier_version_built_is_continued_if_the_user_says_so(world, tmp_path):
    with fake_judge.FakeJudge(judge_model, models=("judge-a",)) as server:
        setting = {"server": server.url, "model": "judge-a"} | SETTING
        build(world, tmp_path, **setting)
        first = len(server.requests)
        journal = tmp_path / "work" / "scores.jsonl"
        rows = []
        for row in read_lines(journal):
            key = json.dumps(["judge-a", *json.loads(row["key"])])
            rows.append({"key": key, "value": row["value"]})
        write_lines(journal, rows)
        note = tmp_path / "work" / "inputs.json"
        note.write_text(note.read_text().replace("sha256:", ""))
        with pytest.raises(UserError, match="built by an earlier version"):
            build(world, tmp_path, **setting)
        build(world, tmp_path, **setting, continue_unknown=True)
        with pytest.raises(UserError, match="earlier version wrote this"):
            build(world, tmp_path, **setting)
        assert len(server.requests) == first
