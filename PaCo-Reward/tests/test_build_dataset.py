"""`paco-reward build-dataset`, whole runs: from grids to training data, and after a kill."""

import json
from collections import Counter
from pathlib import Path

import pytest
from fakes import fake_judge
from pairing_tools import (
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

from paco_judge.errors import UserError
from paco_judge.images import load_image
from paco_judge.questions import RequestForm
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


def test_sets_for_people_then_their_rankings(world, tmp_path):
    build(world, tmp_path / "first", sets_only=True)
    assert not (tmp_path / "first" / "dataset_info.json").exists()
    ranked = rank_like_people(tmp_path / "first")
    build(world, tmp_path / "second", rankings=ranked)
    for row in rows(tmp_path / "second", "consistency_reward_train"):
        generations = {Path(image).parts[2] for image in row["images"]}
        assert row["messages"][1]["content"] == ("Yes" if len(generations) == 1 else "No")


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


def test_edits_labeled_by_a_judge_are_asked_once(edits, tmp_path):
    """About the source and then its edit."""
    setting = {"editing": edits / "bare.jsonl", "duplicate_bits": 0, "min_gap": 0.2}
    with fake_judge.FakeJudge(judge_model, models=["judge-a"]) as server:
        setting |= {"server": server.url, "model": "judge-a", "test_share": 0.0}
        stats = build(None, tmp_path, **setting)
        assert build(None, tmp_path, **setting) == stats
        assert len(server.requests) == 24
    assert 0 < stats["counts"]["editing_unclear"] < 24
    examples = load_examples(tmp_path, "sharegpt_editing_train")
    assert examples
    for example in examples:
        question = example.prompt.removeprefix("<image><image>")
        images = [digest(load_image(image)) for image in example.images]
        p_yes = p_yes_of(*images, question, "judge-a")
        assert abs(p_yes - 0.5) >= 0.1 and example.label == (p_yes > 0.5)
        number = edit_of(question)
        named = [edits / f"source{number}.png", edits / f"edited{number}.png"]
        assert images == [digest(load_image(image)) for image in named]


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
        build(world, output, **setting)
        done = len(server.requests)
        assert needed < done < 2 * needed and all_bytes(output) == whole
        build(world, output, **setting)
        assert len(server.requests) == done
        build(world, tmp_path / "other", seed=1, **setting)
        assert all_bytes(tmp_path / "other") != whole
    assert stats["counts"]["reasons_kept"] == sum(n["pairs"] for n in stats["datasets"].values())


# --- several inputs in one folder -----------------------------------------------------------------


@pytest.fixture
def own_pairs(tmp_path) -> Path:
    """pairs.jsonl, with images that no other input has."""
    lines = []
    for number in range(12):
        images = {"image1": f"own{number}a.png", "image2": f"own{number}b.png"}
        for seed, name in enumerate(images.values(), start=20):
            noise(seed, number).save(tmp_path / name)
        lines.append(images | {"label": number % 2})
    return write_lines(tmp_path / "pairs.jsonl", lines)


def contents(output: Path) -> dict[str, list]:
    """The rows of every data set in the index, whose files are exactly those."""
    index = json.loads((output / "dataset_info.json").read_text())
    files = {file.stem for file in output.glob("*.json")} - {"dataset_info", "stats"}
    counted = set()
    for stats in json.loads((output / "stats.json").read_text()).values():
        counted |= set(stats["datasets"])
    assert files == counted == set(index)
    return {name: rows(output, name) for name in index}


def test_inputs_of_one_folder_keep_each_others_data_sets_and_are_not_exchanged(
    edits, own_pairs, tmp_path
):
    """Labels may be corrected; other pairs or instructions are another data set."""
    output = tmp_path / "out"
    build(None, output, pairs=own_pairs, sets_per_prompt=None)
    before = contents(output)
    build(None, output, editing=edits / "edits.jsonl", duplicate_bits=0)
    both = contents(output)
    assert both == both | before and len(both) == 4
    changed = tmp_path / "changed.jsonl"
    edit_lines = read_lines(edits / "edits.jsonl")
    edit_lines[0]["instruction"] = "another"
    write_lines(changed, edit_lines)
    with pytest.raises(UserError, match="sharegpt_editing"):
        build(None, output, editing=changed)
    assert contents(output) == both
    pairs = read_lines(own_pairs)
    write_lines(changed, [pair | {"reason": "seen in both"} for pair in pairs])
    build(None, output, pairs=changed, sets_per_prompt=None, test_share=0.0)
    del both["consistency_reward_test"]
    assert list(contents(output)) == ["sharegpt_editing_train", "sharegpt_editing_test"] + [
        "consistency_reward_train"
    ]
