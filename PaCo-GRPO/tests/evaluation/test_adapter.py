"""What leaves a run: adapters that plain diffusers reads, their cards, evaluations alone, pictures."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import FluxPipeline
from fakes import fake_judge
from PIL import Image
from tiny_run import ROOT, rows_of, tiny_options, train

from paco_grpo.options import options_to_yaml
from paco_grpo.policies import load_policy
from paco_grpo.policies.base import PolicyLoadError
from paco_grpo.training.build import load_adapter


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tiny_flux_dir, tmp_path_factory):
    """A run's configuration, its last checkpoint, and that epoch's evaluation."""
    config = tiny_options(
        tiny_flux_dir, tmp_path_factory.mktemp("trained"), train__learning_rate=0.05, sample__merge_lora=False
    )
    train(config)
    folder = Path(config.save_dir) / config.run_name
    return config, folder / "checkpoints" / "epoch_0002", folder / "eval" / "epoch_0002"


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image, np.int16)


def data(folder):
    return [json.loads(line) for line in (folder / "eval_data.jsonl").read_text().splitlines()]


def test_plain_diffusers_draws_what_the_evaluation_drew(trained):
    config, checkpoint, evaluation = trained
    policy = load_policy(config.pretrained.model, max_sequence_length=16)
    pipe = FluxPipeline.from_pretrained(config.pretrained.model)
    moved = []
    for adapter in (None, checkpoint / "diffusers"):
        if adapter:
            pipe.load_lora_weights(str(adapter))
        for row in data(evaluation)[:2]:
            image = pipe(
                row["prompt"], height=32, width=32, num_inference_steps=2, max_sequence_length=16,
                guidance_scale=config.sample.guidance_scale, latents=policy.initial_latents([row["seed"]], 32, 32),
            ).images[0]  # fmt: skip
            moved.append(np.abs(np.asarray(image, np.int16) - pixels(evaluation / row["file"])).max())
    assert min(moved[:2]) > 3 and max(moved[2:]) <= 1


@pytest.mark.parametrize("place", ["", "adapter", "diffusers"])
def test_evaluation_alone_gives_what_the_run_gave(trained, tmp_path, place):
    config, checkpoint, evaluation = trained
    metrics = script("evaluate").evaluate_adapter(config, str(checkpoint / place), tmp_path)
    for one, two in zip(data(evaluation), data(tmp_path), strict=True):
        assert (one["seed"], one["prompt"]) == (two["seed"], two["prompt"])
        assert np.abs(pixels(evaluation / one["file"]) - pixels(tmp_path / two["file"])).max() <= 1
    row = rows_of(config, "eval")[-1]
    assert metrics["eval/brightness_mean"] == pytest.approx(row["eval/brightness_mean"], abs=0.1)
    assert metrics["category/odd/brightness_mean"] == pytest.approx(row["category/odd/brightness_mean"], abs=0.1)


def test_evaluate_command_on_the_base_model(trained, tmp_path, capsys):
    config, _, evaluation = trained
    saved = tmp_path / "config.yaml"
    saved.write_text(options_to_yaml(config))
    arguments = ["--config", str(saved), "--output", str(tmp_path / "out"), "--config.test.batch_size=1"]
    assert script("evaluate").main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| category | images | brightness |" in printed and "| all | 5 |" in printed
    assert any(
        np.abs(pixels(evaluation / row["file"]) - pixels(tmp_path / "out" / row["file"])).max() > 3
        for row in data(evaluation)
    )
    assert "eval/brightness_mean" in json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert script("evaluate").main([*arguments, "--adapter", str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err


def test_categories_are_means_of_their_images(trained):
    config, _, evaluation = trained
    rows, table = data(evaluation), (evaluation / "categories.md").read_text()
    even = [row["rewards"]["brightness"] for row in rows if row["category"] == "even"]
    error = np.std(even, ddof=1) / np.sqrt(len(even))
    assert f"| even | {len(even)} | {np.mean(even):.4f} ± {error:.4f} |" in table
    assert rows_of(config, "eval")[-1]["category/even/brightness_mean"] == pytest.approx(np.mean(even))


@pytest.mark.parametrize("name", ["adapter", "diffusers"])
def test_model_card(trained, name):
    config, checkpoint, _ = trained
    text = (checkpoint / name / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == config.pretrained.model
    assert head["library_name"] == {"adapter": "peft", "diffusers": "diffusers"}[name]
    assert head["pipeline_tag"] == "text-to-image"
    assert "| `tiny_run:brightness` | 1 |" in text and config.dataset in text
    last = rows_of(config, "eval")[-1]  # of this very epoch, though the checkpoint was saved before it
    assert f"After epoch 2, {last['eval/num_images']:.0f} images" in text
    assert f"| `brightness` | {last['eval/brightness_mean']:.4f} ±" in text
    assert options_to_yaml(config) in text


def test_a_whole_transformer_is_no_adapter(trained, tmp_path):
    (tmp_path / "transformer").mkdir()
    with pytest.raises(PolicyLoadError, match="without LoRA"):
        load_adapter(load_policy(trained[0].pretrained.model), str(tmp_path))


def test_weights_that_were_saved_are_the_ones_loaded(trained):
    policy = load_policy(trained[0].pretrained.model)
    load_adapter(policy, str(trained[1]))
    assert any(p.abs().sum() > 0 for n, p in policy.transformer.named_parameters() if ".lora_B." in n)
    assert torch.isfinite(torch.cat([p.flatten() for p in policy.transformer.parameters()])).all()


def test_pictures_with_the_judges_score(trained, tmp_path, capsys):
    config, checkpoint, _ = trained
    saved = tmp_path / "config.yaml"
    saved.write_text(options_to_yaml(config))
    arguments = [
        "--config",
        str(saved),
        "--adapter",
        str(checkpoint),
        "--seeds",
        "0,1",
        "--output",
        str(tmp_path / "out"),
    ]
    prompts = ["--prompt", "1x2 grid. [LEFT]: a. [RIGHT]: b.", "--prompt", "2x1 grid. [TOP]: a. [BOTTOM]: b."]
    with fake_judge.FakeJudge() as judge:
        assert (
            script("generate").main([*arguments, *prompts, "--judge", judge.url, "--judge-model", "Paco-Reward-7B"])
            == 0
        )
        assert len(judge.requests) == 4
    rows = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    assert [(row["file"], row["judge"]) for row in rows] == [
        (f"{item:05d}_seed{seed}.png", pytest.approx(0.75)) for item in (0, 1) for seed in (0, 1)
    ]
    with Image.open(tmp_path / "out" / "sheet.png") as sheet:
        assert sheet.height > sheet.width  # a line below each picture
    assert script("generate").main([*arguments, *prompts, "--judge", judge.url]) == 2
    assert "no judge answers" in capsys.readouterr().err
