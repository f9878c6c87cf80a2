"""scripts/generate.py draws the evaluation's images, and keeps those that the judge likes best."""

import argparse
import itertools
import json
import time

import numpy as np
import pytest
from fakes import fake_judge
from named import load as load_named
from PIL import Image
from reward_factories import checked
from tiny_policies import disturb, draw, load, picture
from tiny_run import ROOT, as_arguments, load_script, write_edits

from paco_grpo.commands import generate
from paco_grpo.commands.generate import items_to_draw
from paco_grpo.data.prompts import load_prompts
from paco_grpo.options import ConfigError
from paco_grpo.policies.adapters import add_lora, save_peft
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item
from paco_judge.files import read_json_lines

NAME = "consistency_score"


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("2", [0, 1]), ("7,0", [7, 0]), (f"{2**62},", [2**62]), ("3,3", None), (f"{2**63},", None)],
)
def test_seeds(text, seeds):
    """A number of them, or themselves: one from eval_data.jsonl, too."""
    read_seeds = load_script("generate").read_seeds
    if seeds is not None:
        assert list(read_seeds(text)) == seeds
        return
    with pytest.raises(argparse.ArgumentTypeError, match="different"):
        read_seeds(text)
    for number in ("0", f"{2**63}"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"is written {number},"):
            read_seeds(number)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", "42"], "--seeds"),
        (["--adapter", ""], "--adapter is empty"),
        (["--judge="], "--judge is empty"),
        (["--prompts-file", ""], "--prompts_file is empty"),
        (["--confg.seed=3"], "--confg.seed"),
    ],
)
def test_arguments_that_would_do_something_else_are_refused(capsys, words, named):
    for script in ("generate", "evaluate"):
        with pytest.raises(SystemExit, match="2"):
            load_script(script).main(["--config", f"{ROOT}/config/grpo.py:toy_t2is", *words])
    assert named in capsys.readouterr().err


def test_images_are_those_of_the_evaluation(tiny_folder, tmp_path, capsys, caplog):
    """Of an editor with true CFG, which the toy configuration does not use."""
    name = "qwen_image_edit"
    policy = load(name, tiny_folder(name), guidance_scale=4.0)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    save_peft(policy, tmp_path / "adapter")
    prompts = ("make it blue", "1x2 [LEFT]: a. [RIGHT]: b.")
    (tmp_path / "prompts.txt").write_text(f"{prompts[1]}\n\n")
    more = ["--prompt", prompts[0], "--prompts_file", tmp_path / "prompts.txt"]
    more += ["--seeds", "0,7", "--adapter", tmp_path / "adapter"]
    more += ["--config.train.max_sequence_length=8"]  # the images do not depend on it
    more += ["--config.sample.guidance_scale=4", "--config.sample.negative_prompt= "]
    references = (picture(1, 48, 48), picture(2, 40, 90))
    for number, reference in enumerate(references):
        reference.save(tmp_path / f"{number}.png")
        more += ["--image", tmp_path / f"{number}.png"]
    out = tmp_path / "out"
    out.mkdir()
    for earlier in ("scores.jsonl", "00000_seed7.png", "00002_seed0.png", "00000_seed3.png"):
        (out / earlier).write_text("of an earlier call")
    test = {"test.resolution": 32, "test.num_steps": 2, "test.batch_size": 4}
    options = {"pretrained.model": tiny_folder(name), "max_sequence_length": 24} | test
    command = ["--config", f"{ROOT}/config/grpo.py:toy_kontext", *as_arguments(options)]
    status = load_script("generate").main([*command, *map(str, more), "--output", str(out)])
    assert status == 0, capsys.readouterr().err
    assert len(list(out.iterdir())) == 7  # with the sheet, and two earlier ones
    assert "2 images of earlier calls, such as 00000_seed3.png" in caplog.text
    for number, seed in itertools.product((0, 1), (0, 7)):
        image = Image.open(out / f"0000{number}_seed{seed}.png")
        assert (image.width > image.height) is (number == 1)
        item = Item(number, prompts[number], references=references[number : number + 1])
        (expected,) = draw(policy, [item], [seed], image.height, image.width, 2)
        difference = np.asarray(image, np.int16) - np.asarray(expected, np.int16)
        assert np.abs(difference).max() <= 1


def test_generated_images_are_scored_by_a_judge(trained_run, tmp_path):
    """The second item has the same prompt. It is a row of a file, with the shape of its images."""
    prompt = "2x1 grid. [TOP]: a. [BOTTOM]: b."
    row = {"prompt": prompt, "height": 640, "width": 320}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    out = tmp_path / "out"
    command = ["--config", str(trained_run.folder / "saved.yaml"), "--seeds", "3", "--best", "1"]
    command += ["--output", str(out), "--prompt", prompt]
    command += ["--prompts_file", str(tmp_path / "rows.jsonl")]

    def respond(number, request):
        """The question at the start is answered, the next one is not."""
        return (400, {}, {}) if number == 2 else fake_judge.by_content(number, request)

    with fake_judge.FakeJudge(respond) as judge:
        assert load_script("generate").main([*command, "--judge", judge.url]) == 0
        rows = read_json_lines(out / "scores.jsonl")
        reward = build_rewards({NAME: 1.0}, {NAME: {"base_url": judge.url}})[NAME]
        best = [max(three, key=lambda row: row["judge"] or 0) for three in (rows[:3], rows[3:])]
        for row in best:
            (score,) = reward([Image.open(out / row["file"])], [Item(0, prompt)])
            assert row["judge"] == pytest.approx(score)
    assert [Image.open(out / row["file"]).size for row in best] == [(32, 32), (24, 48)]
    assert len(rows) == 6
    assert sum(row["judge"] is None for row in rows) == 1
    assert [row for row in rows if row["kept"]] == best
    assert {path.name for path in out.glob("0*.png")} == {row["file"] for row in best}


def test_a_judge_that_fails_ends_the_drawing(trained_run, tmp_path, monkeypatch, capsys):
    """Its first score of nine images fails."""

    def fail(images, items):
        raise RuntimeError("out of order")

    monkeypatch.setattr(generate, "_judge", lambda *_: checked(fail))
    sampled = generate.evaluation_latents

    def slowly(*arguments):
        time.sleep(0.05)
        return sampled(*arguments)

    monkeypatch.setattr(generate, "evaluation_latents", slowly)
    command = ["--config", str(trained_run.folder / "saved.yaml"), "--seeds", "9", "--judge", "x"]
    command += ["--config.test.batch_size=1", "--config.sample.reward_batch_size=1"]
    command += ["--output", str(tmp_path), "--prompt", "1x2 grid. [LEFT]: a. [RIGHT]: b."]
    assert load_script("generate").main(command) == 1
    assert "out of order" in capsys.readouterr().err
    assert 1 <= len(list(tmp_path.glob("0*.png"))) < 9


def test_a_file_has_the_items_of_the_evaluation(tmp_path):
    """Edits with the images that its rows name, unless others are given; a line is a prompt."""

    def items_of(configuration, prompts, file, *images):
        command = argparse.Namespace(prompt=prompts, prompts_file=tmp_path / file, image=images)
        items = items_to_draw(load_named(configuration), command)
        assert [item.item_id for item in items] == list(range(len(items)))
        assert [item.prompt for item in items[: len(prompts)]] == prompts
        return items[len(prompts) :]

    write_edits(tmp_path)
    edits = load_prompts(tmp_path, "test", "geneval_image")
    items = items_of("toy_kontext", [], "test_metadata.jsonl")
    assert [(item.prompt, item.images) for item in items] == [(e.prompt, e.images) for e in edits]
    with pytest.raises(ConfigError, match="separate"):
        items_of("toy_kontext", ["p"], "test_metadata.jsonl")
    items = items_of("toy_kontext", ["p"], "test_metadata.jsonl", tmp_path / "train3.png")
    given = load_prompts(tmp_path, "train", "geneval_image")[3].images
    assert [item.images for item in items] == [given] * 3
    row = {"prompt": "r", "image": "train3.png", "reference_boxes": [[0.5, 0, 1, 0.5]]}
    (tmp_path / "boxes.jsonl").write_text(json.dumps(row))
    (item,) = items_of("toy_kontext", [], "boxes.jsonl")
    assert item.crops != item.images
    (item,) = items_of("toy_kontext", [], "boxes.jsonl", tmp_path / "train2.png")
    assert item.crops == item.images  # the box is the other image's
    items = items_of("toy_t2is", ["p", "q"], "test_metadata.jsonl")
    assert [item.num_references for item in items] == [0] * 3
    (tmp_path / "lines.txt").write_text(" a\u2028b\x85c \n\nd\n", encoding="utf-8")
    prompts = [item.prompt for item in items_of("toy_t2is", ["p"], "lines.txt")]
    assert prompts == ["a\u2028b\x85c", "d"]
