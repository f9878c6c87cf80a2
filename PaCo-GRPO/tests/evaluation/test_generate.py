"""scripts/generate.py draws what the evaluation draws, with every generator, and refuses what cannot be."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_policies import EDITORS, NAMES, disturb, draw, load, picture

from paco_grpo.policies.adapters import add_lora, save_peft
from paco_grpo.types import Item

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = {"flux": "toy_t2is", "flux_kontext": "toy_kontext", "qwen_image_edit": "toy_qwen_edit"}


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("paco_grpo_generate", ROOT / "scripts" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(name, model, *more):
    options = {
        "pretrained.model": model, "test.resolution": 32, "test.num_steps": 2, "test.batch_size": 4,
        "max_sequence_length": 24,
    }  # fmt: skip
    settings = [f"--config.{key}={value}" for key, value in options.items()]
    return ["--config", f"{ROOT}/config/grpo.py:{CONFIGURATIONS[name]}", *settings, *map(str, more)]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_those_of_the_evaluation(generate, tiny_folder, tmp_path, name, capsys):
    guidance = {"flux": 3.5, "flux_kontext": 2.5, "qwen_image_edit": 4.0}[name]
    policy = load(name, tiny_folder(name), guidance_scale=guidance)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    save_peft(policy, tmp_path / "adapter")
    picture(1, 48, 48).save(tmp_path / "a.png")
    picture(2, 40, 90).save(tmp_path / "b.png")
    images = ["--image", tmp_path / "a.png", "--image", tmp_path / "b.png"] if name in EDITORS else []
    if name == "qwen_image_edit":  # with true CFG, which the toy configuration does not use
        images += [f"--config.sample.guidance_scale={guidance}", "--config.sample.negative_prompt= "]
    more = ["--prompt", "make it blue", "--prompt", "b", "--seeds", "0,7", "--adapter", tmp_path / "adapter", *images]
    status = generate.main(arguments(name, tiny_folder(name), *more, "--output", tmp_path / "out"))
    assert status == 0, capsys.readouterr().err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"sheet.png", *(f"0000{i}_seed{seed}.png" for i in (0, 1) for seed in (0, 7))}

    reference = Image.open(tmp_path / "a.png") if name in EDITORS else None
    (expected,) = draw(policy, [Item(0, "make it blue", image=reference)], [7], 32, 32, 2)
    with Image.open(tmp_path / "out" / "00000_seed7.png") as image:
        assert np.abs(np.asarray(image, np.int16) - np.asarray(expected, np.int16)).max() <= 1
    if name in EDITORS:  # drawn in the shape of its reference
        with Image.open(tmp_path / "out" / "00001_seed0.png") as image:
            assert image.width > image.height


def test_a_file_of_edits(generate, tiny_folder, tmp_path):
    picture(1).save(tmp_path / "a.png")
    rows = [{"prompt": "x", "image": "a.png"}, {"prompt": "y", "image": "a.png", "height": 32, "width": 64}]
    (tmp_path / "test_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = "flux_kontext"
    more = ["--prompts-file", tmp_path / "test_metadata.jsonl", "--output", tmp_path / "out"]
    assert generate.main(arguments(name, tiny_folder(name), *more)) == 0
    with Image.open(tmp_path / "out" / "00001_seed0.png") as image:
        assert image.width > image.height


def test_mistakes_are_one_clear_line(generate, tiny_folder, tmp_path, capsys):
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n')
    image, prompt = ["--image", tmp_path / "a.png"], ["--prompt", "x"]
    for name, more, said in (
        ("flux_kontext", prompt, "edits images: give --image FILE (prompt 'x' has none)"),
        ("flux", [*prompt, *image], "generates from text alone: leave out --image"),
        ("flux_kontext", [*prompt * 3, *image * 2], "--image is given 2 times for 3 prompts"),
        ("flux_kontext", [*prompt, "--image", tmp_path / "b.png"], "b.png"),
        ("flux", [], "nothing to generate"),
        ("flux", [*prompt, "--seeds", "0,a"], "--seeds 0,a is not a list such as 0,1,2"),
        ("flux", ["--prompts-file", tmp_path / "none.txt"], "none.txt does not exist"),
        (
            "flux",
            ["--prompts-file", tmp_path / "broken.jsonl"],
            "broken.jsonl:1: field 'prompt' must be a text, got None",
        ),
    ):
        model = tiny_folder(name)  # built at its first use, with progress on stderr
        capsys.readouterr()
        assert generate.main(arguments(name, model, *more, "--output", tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error
    assert not (tmp_path / "out").exists()
