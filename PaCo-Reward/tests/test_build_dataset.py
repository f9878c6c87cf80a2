"""`paco-reward build-dataset`, whole runs: from grids to training data, and after a kill."""

import json
from collections import Counter
from pathlib import Path

import pytest
from fakes import fake_judge
from pairing_tools import (
    all_bytes,
    build,
    judge_model,
    noise,
    rank_like_people,
    read_lines,
    rows,
    write_lines,
)

from paco_judge.errors import UserError
from paco_judge.grid import split_prompt
from paco_judge.images import data_url, load_image
from paco_judge.questions import RequestForm, theme_question
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs, load_examples


def test_a_users_question_is_asked_and_learned(world, tmp_path):
    """Training data, accuracy and the server share wording and labels; a change asks again."""
    (tmp_path / "mine.txt").write_text("Same {theme}?")
    setting = {"question": tmp_path / "mine.txt", "image_labels": "<img{n}>: "}
    with fake_judge.FakeJudge(judge_model) as server:
        build(world, tmp_path / "out", server=server.url)
        before = len(server.requests)
        stats = build(world, tmp_path / "out", server=server.url, **setting)
        content = server.requests[before]["messages"][0]["content"]
        assert len(server.requests) == 2 * before
    texts = [part.get("text", "image") for part in content]
    assert texts[:4] == ["<img1>: ", "image", "<img2>: ", "image"]
    assert texts[4].startswith("Same a 1x3 grid of")
    assert stats["asked"]["questions"][0]["template"] == "Same {theme}?"
    name = "consistency_reward_train"
    prefix = "<img1>: <image><img2>: <image>"
    prompts = {row["messages"][0]["content"] for row in rows(tmp_path / "out", name)}
    pairs, _ = labeled_pairs(tmp_path / "out", name, form=RequestForm("<img{n}>: "))
    assert {prefix + pair.question for pair in pairs} == prompts
    with pytest.raises(UserError, match="--image_labels"):
        labeled_pairs(tmp_path / "out", name)


def test_sets_for_people_then_their_rankings(world, tmp_path):
    """Also of images that are already cut."""
    build(world, tmp_path / "first", sets_only=True)
    assert not (tmp_path / "first" / "dataset_info.json").exists()
    ranked = rank_like_people(tmp_path / "first")
    build(world, tmp_path / "second", rankings=ranked)
    for row in rows(tmp_path / "second", "consistency_reward_train"):
        generations = {Path(image).parts[2] for image in row["images"]}
        assert row["messages"][1]["content"] == ("Yes" if len(generations) == 1 else "No")
    cut = {
        "sub_figures": tmp_path / "first" / "images",
        "metadata": tmp_path / "first" / "prompt_data.jsonl",
    }
    build(None, tmp_path / "third", rankings=ranked, **cut)
    assert all_bytes(tmp_path / "third") == all_bytes(tmp_path / "second")


@pytest.fixture(scope="module")
def edits(tmp_path_factory) -> Path:
    """edits.jsonl with both labels of 12 edits, and bare.jsonl without."""
    folder = tmp_path_factory.mktemp("edits")
    lines = []
    for number in range(12):
        noise(10, number).save(folder / f"source{number}.png")
        noise(11, number).save(folder / f"edited{number}.png")
        line = {"source": f"source{number}.png", "edited": f"edited{number}.png"}
        lines.append(line | {"instruction": f"make it {number}"})
    write_lines(folder / "bare.jsonl", lines)
    for number, line in enumerate(lines):
        line["consistency"] = "Yes" if number % 2 else "No"
        line["follows"] = number % 2 == 0
    write_lines(folder / "edits.jsonl", lines)
    return folder


def test_labeled_edits(edits, tmp_path):
    stats = build(None, tmp_path, editing=edits / "edits.jsonl", test_share=0.3, duplicate_bits=0)
    assert sum(numbers["pairs"] for numbers in stats["datasets"].values()) > 12
    sides = {}
    for part in ("train", "test"):
        examples = load_examples(tmp_path, f"sharegpt_editing_{part}")
        sides[part] = {image for example in examples for image in example.images}
        for question in ("follow the instruction", "stay consistent"):
            answers = Counter(example.answer for example in examples if question in example.prompt)
            assert answers["Yes"] == answers["No"]
        for example in examples:
            number = int(example.prompt.split("make it ")[1].split('"')[0])
            consistent = "stay consistent" in example.prompt
            assert example.answer == ("Yes" if consistent == bool(number % 2) else "No")
    assert not sides["train"] & sides["test"]


def test_edits_labeled_by_a_judge_are_asked_once(edits, tmp_path):
    """About the source and then its edit."""

    def by_number(number, request):
        *images, text = request["messages"][0]["content"]
        edit = int(text["text"].split("make it ")[1].split('"')[0])
        for image, name in zip(images, ("source", "edited"), strict=True):
            shown = load_image(edits / f"{name}{edit}.png")
            if image["image_url"]["url"] != data_url(shown):
                return 400, {"error": {"message": f"no {name}"}}, {}
        return 200, fake_judge.answer(0.5 if edit == 3 else 0.9 if edit % 2 else 0.1), {}

    with fake_judge.FakeJudge(by_number) as server:
        setting = {
            "editing": edits / "bare.jsonl",
            "server": server.url,
            "test_share": 0.0,
            "duplicate_bits": 0,
        }
        stats = build(None, tmp_path, **setting)
        assert build(None, tmp_path, **setting) == stats
        assert len(server.requests) == 24
    assert stats["counts"]["editing_unclear"] == 2
    numbers = stats["datasets"]["sharegpt_editing_train"]
    assert numbers["yes"] == numbers["no"] == 10


def test_a_run_is_determined_by_its_seed_and_resumes_without_loss_or_repetition(world, tmp_path):
    with fake_judge.FakeJudge(judge_model) as server:
        output = tmp_path / "out"
        setting = {"server": server.url, "reasons": True}
        stats = build(world, output, **setting)
        needed = len(server.requests)
        whole = all_bytes(output)
        for name in ("scores", "reasons"):
            journal = output / "work" / f"{name}.jsonl"
            content = journal.read_bytes()
            journal.write_bytes(content[: len(content) // 2])  # cut off in a line
        (output / "stats.json").unlink()
        build(world, output, **setting)
        done = len(server.requests)
        assert needed < done < 2 * needed
        assert all_bytes(output) == whole
        build(world, output, **setting)
        assert len(server.requests) == done
        for name, seed in (("again", 42), ("other", 1)):
            build(world, tmp_path / name, seed=seed, **setting)
            assert (all_bytes(tmp_path / name) == whole) == (name == "again")
    for example in load_examples(output, "consistency_reward_cot_train"):
        assert example.answer.startswith(("Yes. The shape", "No. The shape"))
    assert stats["counts"]["reasons_kept"] == sum(n["pairs"] for n in stats["datasets"].values())


def test_why_questions_stay_without_answer_is_said(world, tmp_path, caplog):
    """The second run asks only what the first got no answer to, and again gets none."""
    lines = read_lines(world / "metadata.jsonl")
    refused = theme_question(split_prompt(lines[0]["prompt"]).theme)

    def refuses(number, request):
        question = request["messages"][0]["content"][-1]["text"]
        if question == refused or not request.get("logprobs"):
            return 400, {"error": {"message": "unloaded"}}, {}
        return judge_model(number, request)

    with fake_judge.FakeJudge(refuses) as server:
        command = ["build-dataset", "--grids", str(world / "grids")]
        command += ["--metadata", str(world / "metadata.jsonl")]
        command += ["--output", str(tmp_path), "--server", server.url]
        for _ in range(2):
            caplog.clear()
            assert main(command) == 1
            assert caplog.text.count("unloaded") == 1
        assert rows(tmp_path, "consistency_reward_train")
        with pytest.raises(UserError, match="unloaded"):  # to every request for reasons
            build(world, tmp_path, server=server.url, reasons=True)


# --- several inputs in one folder -----------------------------------------------------------------


@pytest.fixture
def own_pairs(tiny, tmp_path) -> Path:
    """pairs.jsonl, with images that no other input has."""
    lines = []
    for number in range(12):
        names = [f"own{number}{side}.png" for side in "ab"]
        for side, name in enumerate(names):
            tiny.picture(900 + 2 * number + side).save(tmp_path / name)
        label = ("Yes", "No")[number % 2]
        lines.append({"image1": names[0], "image2": names[1], "label": label})
    return write_lines(tmp_path / "pairs.jsonl", lines)


def contents(output: Path) -> dict[str, list]:
    """The rows of every data set in the index, whose files are exactly those."""
    index = json.loads((output / "dataset_info.json").read_text())
    files = {file.stem for file in output.glob("*.json")} - {"dataset_info", "stats"}
    assert files == set(index)
    for name in index:
        assert index[name]["file_name"] == f"{name}.json"
    stats = json.loads((output / "stats.json").read_text())
    counted = {name for of_name in stats.values() for name in of_name["datasets"]}
    assert counted == set(index)
    return {name: rows(output, name) for name in index}


def test_each_input_keeps_the_data_sets_of_the_others(world, edits, own_pairs, tmp_path):
    """Whatever the order; a repeated one replaces its own, also where it leaves no test set."""
    build(world, tmp_path / "cut", sets_only=True)
    ranked = rank_like_people(tmp_path / "cut")
    metadata = {"metadata": world / "metadata.jsonl", "rankings": ranked}
    inputs = {
        "grids": {"grids": world / "grids"} | metadata,
        "cut": {"sub_figures": tmp_path / "cut" / "images", "name": "cut"} | metadata,
        "edits": {"editing": edits / "edits.jsonl", "duplicate_bits": 0},
        "own": {"pairs": own_pairs, "sets_per_prompt": None, "name": "own"},
    }
    names = {"grids": "consistency_reward", "cut": "cut", "edits": "sharegpt_editing"}
    for order in (["own", "edits", "grids"], ["cut", "edits", "own"]):
        output = tmp_path / "-".join(order)
        expected = {}
        for kind in order:
            alone = tmp_path / f"{output.name}-{kind}"
            build(None, alone, **inputs[kind])
            expected |= contents(alone)
            build(None, output, **inputs[kind])
            assert contents(output) == expected
        for kind in order:
            build(None, output, **inputs[kind] | {"test_share": 0.0})
            name = names.get(kind, kind)
            expected.pop(f"{name}_test")
            found = contents(output)
            trained = found.pop(f"{name}_train")
            assert len(trained) > len(expected.pop(f"{name}_train"))
            assert found == expected
            expected = contents(output)


def test_a_folder_is_not_built_from_other_inputs(world, edits, own_pairs, tmp_path):
    """Labels may be corrected; other images, pairs, prompts or instructions are another data set."""
    output = tmp_path / "out"
    own = {"pairs": own_pairs, "sets_per_prompt": None, "test_share": 0.3}
    build(None, output, **own)
    build(None, output, editing=edits / "edits.jsonl", duplicate_bits=0)
    before = contents(output)
    lines = read_lines(own_pairs)
    others = own_pairs.with_name("others.jsonl")
    for changed in (lines[2:], [line | {"theme": "a fox"} for line in lines]):
        write_lines(others, changed)
        with pytest.raises(UserError, match="consistency_reward"):
            build(None, output, **own | {"pairs": others})
    with pytest.raises(UserError, match="consistency_reward"):  # sub-figures under the same name
        build(world, output, sets_only=True)
    edit_lines = read_lines(edits / "edits.jsonl")
    edit_lines[0] |= {"instruction": "another"}
    for line in edit_lines:
        line |= {name: str(edits / line[name]) for name in ("source", "edited")}
    write_lines(others, edit_lines)
    with pytest.raises(UserError, match="sharegpt_editing"):
        build(None, output, editing=others)
    assert contents(output) == before
    write_lines(others, [*lines[:1], *(line | {"reason": "seen in both"} for line in lines[1:])])
    build(None, output, **own | {"pairs": others})
    assert contents(output) != before
    build(world, output, sets_only=True, name="grids")
    with pytest.raises(UserError, match="images"):  # the sub-figures of p0 are others'
        few = write_lines(tmp_path / "few.jsonl", read_lines(world / "metadata.jsonl")[1:])
        build(world, output, sets_only=True, name="few", metadata=few)


def test_data_sets_with_and_without_reasons_share_a_split(own_pairs, tmp_path):
    """A new build removes the other ones, which would hold its training pairs for testing."""

    def agrees(number, request):
        text = request["messages"][0]["content"][-1]["text"]
        verdict = "Yes" if "The verdict that was given is: Yes" in text else "No"
        return 200, {"choices": [{"message": {"content": f"{verdict}. Seen in both images."}}]}, {}

    own = {"pairs": own_pairs, "sets_per_prompt": None, "test_share": 0.3}
    with fake_judge.FakeJudge(agrees) as server:
        build(None, tmp_path / "out", **own, server=server.url, reasons=True)
    with_reasons = {f"consistency_reward_cot_{part}" for part in ("train", "test")}
    assert set(contents(tmp_path / "out")) == with_reasons
    build(None, tmp_path / "out", **own, seed=5)
    without = {f"consistency_reward_{part}" for part in ("train", "test")}
    assert set(contents(tmp_path / "out")) == without
