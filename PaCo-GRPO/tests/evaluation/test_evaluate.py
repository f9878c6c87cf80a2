"""scripts/evaluate.py: the image of each prompt, of the right adapter, with the right scores."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from reward_factories import checked, unlike_others
from tiny_policies import build, disturb, draw, load
from tiny_run import (
    brightness,
    load_script,
    rows_of,
    tiny_edit_options,
    tiny_options,
    write_rows,
)

from paco_grpo.data.prompts import load_prompts
from paco_grpo.data.sets import prompt_sets
from paco_grpo.evaluation.evaluate import evaluation_set, log_repeats, measured
from paco_grpo.options import RunOptions, make_options, options_to_yaml
from paco_grpo.policies import Policy
from paco_grpo.policies.adapters import add_lora, save_peft
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer
from paco_grpo.types import Item
from paco_judge.files import read_json_lines

SIZES = ((16, 32), (32, 16), (16, 32), (48, 16), (32, 16))  # of the items; two pairs share a batch


class Evaluated(NamedTuple):
    """An evaluation in which every prompt, seed and category is another one.

    Seven images of five items; neither steps, size nor seed are those of training.
    """

    options: RunOptions
    adapters: dict[str, Path | None]  # two, and base
    folder: Path

    def command(self, output: str, **places: str) -> list[str]:
        """``places``: adapter and against, by name."""
        words = ["--config", str(self.folder / "saved.yaml")]
        words += ["--output", str(self.folder / output)]
        for option, name in places.items():
            words += [f"--{option}", str(self.adapters[name] or "base")]
        return words

    def policy(self, name: str) -> Policy:
        policy = load("flux", Path(self.options.pretrained.model), max_sequence_length=16)
        if self.adapters[name] is not None:
            add_lora(policy, lora_path=self.adapters[name])
        return policy


@pytest.fixture(scope="module")
def evaluated(tiny_flux_dir, tmp_path_factory) -> Evaluated:
    """The first adapter against the second, by the command."""
    folder = tmp_path_factory.mktemp("evaluated")
    options = tiny_options(
        tiny_flux_dir,
        folder,
        item_size="exact",
        seed=3,
        sample__num_steps=3,
        sample__guidance_scale=3.5,
        test__num_steps=4,
        test__seed=11,
        test__num_images=7,
        test__batch_size=2,
        test__reward_fn='{"tiny_run:brightness": 1.0, "reward_factories:asked": 0.5}',
    )
    rows = []
    for number, (height, width) in enumerate(SIZES):
        row = {"prompt": f"{'abcde'[number]} 1x2 [LEFT]: x{number}. [RIGHT]: y{number}."}
        row |= {"height": height, "width": width, "category": f"kind {number}", "idx": f"i{number}"}
        rows.append(row | {"open": number % 2 == 0})
    write_rows(Path(options.dataset), "test", rows)
    (folder / "saved.yaml").write_text(options_to_yaml(options))
    adapters = {"first": folder / "first", "second": folder / "second", "base": None}
    for seed, place in enumerate((folder / "first", folder / "second")):
        policy = load("flux", tiny_flux_dir, max_sequence_length=16)
        add_lora(policy, rank=2 + seed, alpha=4)
        disturb(policy, seed)
        save_peft(policy, place)
    built = Evaluated(options, adapters, folder)
    command = built.command("pair", adapter="first", against="second")
    assert load_script("evaluate").main(command) == 0
    return built


def test_each_image_is_of_its_prompt_seed_size_and_steps(evaluated):
    rows = read_json_lines(evaluated.folder / "pair" / "eval_data.jsonl")
    items = load_prompts(evaluated.options.dataset, "test")
    expected = evaluation_set(items, 7, seed=11)
    assert [row["item_id"] for row in rows] == [0, 1, 2, 3, 4, 0, 1]
    policy = evaluated.policy("first")
    for number, (row, (item, seed)) in enumerate(zip(rows, expected, strict=True)):
        assert (row["file"], row["prompt"]) == (f"{number:05d}.png", item.prompt)
        assert (row["seed"], row["idx"]) == (seed, f"i{item.item_id}")
        assert (row["category"], row["open"]) == (f"kind {item.item_id}", item.item_id % 2 == 0)
        height, width = SIZES[item.item_id]
        (image,) = draw(policy, [item], [seed], height, width, 4)
        saved = pixels(evaluated.folder / "pair" / row["file"])
        assert saved.shape == (height, width, 3)
        assert np.abs(saved - np.asarray(image, np.int16)).max() <= 1
        # Scores: of this image, and of this prompt.
        (brightness_of_file,) = brightness()([Image.fromarray(saved.astype(np.uint8))], [item])
        assert row["rewards"]["brightness"] == pytest.approx(brightness_of_file, abs=1e-9)
        assert row["rewards"]["asked"] == item.item_id


@pytest.mark.parametrize("name", ["second", "base"])
def test_the_other_side_is_evaluated_as_if_alone(evaluated, name):
    """The base without the adapter, and the second adapter without the first."""
    main = load_script("evaluate").main
    assert main(evaluated.command(f"alone {name}", adapter=name)) == 0
    pair = evaluated.folder / "pair"
    if name == "base":
        pair = evaluated.folder / "against base"
        assert main(evaluated.command(pair.name, adapter="first", against="base")) == 0
    alone = evaluated.folder / f"alone {name}"
    for folder, is_same in ((pair / "against", True), (pair, False)):
        for one, other in zip(
            read_json_lines(alone / "eval_data.jsonl"),
            read_json_lines(folder / "eval_data.jsonl"),
            strict=True,
        ):
            assert (one == other) is is_same
            same = np.array_equal(pixels(alone / one["file"]), pixels(folder / other["file"]))
            assert same is is_same
    record = json.loads((pair / "results.json").read_text())
    assert record["missing"] == {"brightness": 0, "asked": 0}
    first, other, difference = (of["brightness"] for of in record["results"].values())
    assert first["prompts"] == 5
    assert difference["mean"] == pytest.approx(first["mean"] - other["mean"])
    assert difference["mean"] != 0


def test_the_same_command_continues_where_it_stopped(evaluated, capsys):
    command = evaluated.command("pair", adapter="first", against="second")
    main = load_script("evaluate").main
    folder = evaluated.folder / "pair"
    rows = read_json_lines(folder / "eval_data.jsonl")
    times = {file: file.stat().st_mtime_ns for file in folder.glob("0*.png")}
    lost = folder / "00003.png"
    content = lost.read_bytes()
    lost.unlink()
    (folder / "metrics.json").unlink()
    assert main(command) == 0
    assert read_json_lines(folder / "eval_data.jsonl") == rows
    assert lost.read_bytes() == content
    assert [file for file in times if file.stat().st_mtime_ns != times[file]] == [lost]
    assert main([*command, "--config.test.num_steps=3"]) == 1  # another command is not mixed in
    assert "config.test.num_steps" in capsys.readouterr().err


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image, np.int16)


def test_prompts_that_repeat_are_said(caplog):
    """Two sets have four images each. Where a reward compares images, repeats are meant."""
    items = [Item(number, "p", dataset=number // 5) for number in range(8)]
    values = {"datasets": {"a": {"folder": "x"}, "b": {"folder": "x"}}, "test": {"num_images": 8}}
    options = make_options(values)
    sets = prompt_sets(options)
    reward = checked(lambda images, items: [])
    log_repeats(items[:5], sets[:1], make_options({}), {"a": reward})
    assert caplog.messages == []
    log_repeats(items, sets, options, {"a": reward})
    assert "sets: b: 3 prompts, 4 images: each is drawn up to 2 times" in caplog.text
    caplog.clear()
    reward.compares_images = True
    log_repeats(items, sets, options, {"a": reward})
    assert caplog.messages == []


def test_a_reward_that_compares_images_says_nothing_of_a_single_one():
    images = [SimpleNamespace(item=Item(number, "x")) for number in (0, 1, 1)]
    rewards = {"compares": checked(unlike_others())}
    scores, missing = measured(np.array([[1.0], [np.nan], [0.25]]), rewards, images)
    np.testing.assert_array_equal(scores, [[np.nan], [np.nan], [0.25]])
    assert missing.tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("place", ["", "diffusers"])
def test_evaluating_an_adapter_repeats_the_run(trained_run, tmp_path, place):
    """The adapter that the run started from is not needed."""
    evaluation = trained_run.folder / "eval" / "epoch_0002"
    adapter = trained_run.folder / "checkpoints" / "epoch_0002" / place
    arguments = ["--config", str(trained_run.folder / "saved.yaml"), "--adapter", str(adapter)]
    arguments.append("--config.train.lora_path=nowhere")
    assert load_script("evaluate").main([*arguments, "--output", str(tmp_path)]) == 0
    train_rows = rows_of(trained_run.options, "train")
    assert train_rows[-1]["health/velocity_change"] > 0.01  # the adapter matters
    rows = read_json_lines(evaluation / "eval_data.jsonl")
    for one, two in zip(rows, read_json_lines(tmp_path / "eval_data.jsonl"), strict=True):
        assert (one["seed"], one["prompt"]) == (two["seed"], two["prompt"])
        assert np.abs(pixels(evaluation / one["file"]) - pixels(tmp_path / two["file"])).max() <= 1
    logged = rows_of(trained_run.options, "eval")[-1]
    odd = [row["rewards"]["brightness"] for row in rows if row["category"] == "odd"]
    assert logged["category/odd/brightness_mean"] == pytest.approx(np.mean(odd))


def test_images_of_an_interrupted_evaluation_do_not_stay(tiny_flux_dir, tmp_path):
    """They may be of other weights."""
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=0, test__save_eval_images=True)
    run = build_run(options)
    folder = run.folder / "eval" / "epoch_0000"
    folder.mkdir(parents=True)
    for number in (1, 77):
        Image.new("RGB", (8, 8)).save(folder / f"{number:05d}.png")
    Trainer(run).fit()
    assert not (folder / "00077.png").exists()
    assert pixels(folder / "00001.png").shape == (32, 32, 3)


def test_reference_images_do_not_stay_in_memory(tmp_path):
    """Of a data set; a reward keeps crops of what it is given."""
    (tmp_path / "own.py").write_text(
        "def width(): return lambda images, items: [item.crops[0].width for item in items]"
    )
    reward = json.dumps({f"{tmp_path / 'own.py'}:width": 1.0})
    changes = {"num_epochs": 0, "train__reward_fn": reward, "test__reward_fn": reward}
    model = build("flux_kontext", tmp_path / "kontext")
    run = build_run(tiny_edit_options(model, tmp_path, **changes))
    Trainer(run).fit()
    assert not any("crops" in vars(item) for item in run.test_items)
