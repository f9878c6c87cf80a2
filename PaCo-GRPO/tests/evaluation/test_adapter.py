"""Adapters: scripts/evaluate.py repeats a run's evaluation, model cards, judged images."""

import json
import shutil

import numpy as np
import pytest
import yaml
from fakes import fake_judge
from PIL import Image
from tiny_run import load_script, rows_of, tiny_options, train

from paco_grpo.evaluation.evaluate import evaluation_metrics, evaluation_set
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import options_to_yaml
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.types import Item


@pytest.fixture
def trained(trained_run):
    """A run's options, its last checkpoint, and that epoch's evaluation."""
    folder = trained_run.folder
    return (
        trained_run.options,
        folder / "checkpoints" / "epoch_0002",
        folder / "eval" / "epoch_0002",
    )


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image, np.int16)


def test_evaluation_set_repeats_items_with_new_seeds():
    items = [Item(i, str(i)) for i in range(3)]
    chosen = evaluation_set(items, 7, seed=5)
    assert [item.item_id for item, _ in chosen] == [0, 1, 2, 0, 1, 2, 0]
    assert len({seed for _, seed in chosen}) == 7
    assert evaluation_set(items, None, 5) == chosen[:3]
    assert {s for _, s in evaluation_set(items, 7, 6)}.isdisjoint(s for _, s in chosen)


def test_summary_against_numpy():
    scores = np.array([[1.0, 5.0], [3.0, np.nan], [8.0, 6.0]])
    metrics = evaluation_metrics(scores, np.isnan(scores), ["a", "b"], ["c", "c", None])
    assert metrics == pytest.approx(
        {
            "eval/num_images": 3,
            "eval/missing_share": 1 / 3,
            "eval/a_mean": 4.0,
            "eval/a_stderr": np.std([1, 3, 8], ddof=1) / np.sqrt(3),
            "eval/b_mean": 5.5,
            "eval/b_stderr": 0.5,
            "eval/b_missing": 1 / 3,
            "category/c/a_mean": 2.0,
            "category/c/b_mean": 5.0,
        }
    )


@pytest.mark.parametrize("place", ["", "diffusers"])
def test_evaluating_an_adapter_repeats_the_run(trained, tmp_path, place):
    options, checkpoint, evaluation = trained
    arguments = [
        "--config",
        str(checkpoint.parents[1] / "saved.yaml"),
        "--adapter",
        str(checkpoint / place),
    ]
    assert load_script("evaluate").main([*arguments, "--output", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert rows_of(options, "train")[-1]["health/velocity_change"] > 0.01  # the adapter matters
    for one, two in zip(read_rows(evaluation), read_rows(tmp_path), strict=True):
        assert (one["seed"], one["prompt"]) == (two["seed"], two["prompt"])
        assert np.abs(pixels(evaluation / one["file"]) - pixels(tmp_path / two["file"])).max() <= 1
    logged = rows_of(options, "eval")[-1]
    for name in ("eval/brightness_mean", "category/odd/brightness_mean"):
        assert metrics[name] == pytest.approx(logged[name], abs=0.1)
    even = [
        row["rewards"]["brightness"] for row in read_rows(evaluation) if row["category"] == "even"
    ]
    assert logged["category/even/brightness_mean"] == pytest.approx(np.mean(even))


@pytest.mark.parametrize("option", ["--adapter", "--against"])
def test_a_damaged_adapter_is_named_as_it_was_typed(option, trained, tmp_path, capsys):
    _, checkpoint, _ = trained
    damaged = shutil.copytree(checkpoint / "adapter", tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"no weights")
    config = checkpoint.parents[1] / "saved.yaml"
    words = ["--config", config, option, damaged, "--output", tmp_path / "out"]
    assert load_script("evaluate").main([str(word) for word in words]) == 2
    assert f"error: {option}: the LoRA at {damaged} is damaged" in capsys.readouterr().err


def test_an_image_that_is_not_finite_is_missing_and_ends_nothing(
    tiny_flux_dir, tmp_path, monkeypatch
):
    initial = FluxPolicy.initial_latents

    def diverging(policy, seeds, height, width):
        latents = initial(policy, seeds, height, width)
        if height == 32:  # the second one of the evaluation
            latents[1:2] = float("nan")
        return latents

    monkeypatch.setattr(FluxPolicy, "initial_latents", diverging)
    changes = {"num_epochs": 1, "test__save_eval_images": True, "logging_platform": "tensorboard"}
    changes["train__max_missing_reward_fraction"] = 0.2  # one of five; above it, the run stops
    run = train(tiny_options(tiny_flux_dir, tmp_path, **changes)).run
    rows = read_rows(run.folder / "eval" / "epoch_0001")
    assert [row["file"] is None for row in rows] == [False, True, False, False, False]
    assert rows[1]["rewards"] == {"brightness": None}


def test_model_card(trained):
    options, checkpoint, _ = trained
    for name, library in (("adapter", "peft"), ("diffusers", "diffusers")):
        text = (checkpoint / name / "README.md").read_text()
        head = yaml.safe_load(text.split("---")[1])
        assert head["base_model"] == options.pretrained.model
        assert head["library_name"] == library
        assert head["pipeline_tag"] == "text-to-image"
        assert options_to_yaml(options) in text


def test_generated_images_are_scored_by_a_judge(trained, tmp_path, capsys):
    checkpoint = trained[1]
    out = tmp_path / "out"
    main = load_script("generate").main
    kwargs = {"consistency_score": {"model": "Paco-Reward-7B", "port": 1}}
    arguments = ["--config", str(checkpoint.parents[1] / "saved.yaml")]
    arguments += ["--adapter", str(checkpoint), "--seeds", "3", "--output", str(out)]
    arguments += ["--prompt", "1x2 grid. [LEFT]: a. [RIGHT]: b."]
    arguments += ["--prompt", "2x1 grid. [TOP]: a. [BOTTOM]: b."]
    arguments.append(f"--config.train.reward_fn_kwargs={kwargs}")

    def respond(number, request):
        """The question at the start is answered, the next one is not."""
        return (400, {}, {}) if number == 2 else fake_judge.by_content(number, request)

    with fake_judge.FakeJudge(respond) as judge:
        assert main([*arguments, "--judge", judge.url, "--best", "1", "--panels"]) == 0
    rows = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [
        f"0000{item}_seed{seed}.png" for item in (0, 1) for seed in range(3)
    ]
    assert sum(row["judge"] is None for row in rows) == 1
    best = [max(three, key=lambda row: row["judge"] or 0)["file"] for three in (rows[:3], rows[3:])]
    assert [row["file"] for row in rows if row["kept"]] == best
    expected = set()
    for file in best:
        for panel in ("", "_panel1", "_panel2"):
            expected.add(file.replace(".png", f"{panel}.png"))
    assert {path.name for path in out.glob("0*.png")} == expected
    height, width, _ = pixels(out / best[0]).shape
    assert pixels(out / best[0].replace(".png", "_panel1.png")).shape == (height, width // 2, 3)
    height, width, _ = pixels(out / "sheet.png").shape
    assert 3 * height > 2 * width  # two rows of three, with a line below each picture
    assert main([*arguments, "--judge", judge.url]) == 2
    assert judge.url in capsys.readouterr().err
