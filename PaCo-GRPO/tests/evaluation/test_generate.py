"""scripts/generate.py draws the evaluation's images with every policy; refuses wrong arguments."""

import json

import numpy as np
import pytest
from PIL import Image
from tiny_policies import EDITORS, disturb, draw, load, picture
from tiny_run import ROOT, as_arguments, load_script

from paco_grpo.policies.adapters import add_lora, save_peft
from paco_grpo.types import Item

CONFIGS = {
    "flux": "toy_t2is",
    "flux2": "klein_editing",
    "flux_kontext": "toy_kontext",
    "qwen_image_edit": "toy_kontext",
}


@pytest.fixture(scope="module")
def generate():
    return load_script("generate")


def arguments(name, model, *more):
    test = {"test.resolution": 32, "test.num_steps": 2, "test.batch_size": 4}
    options = as_arguments({"pretrained.model": model, "max_sequence_length": 24} | test)
    return ["--config", f"{ROOT}/config/grpo.py:{CONFIGS[name]}", *options, *map(str, more)]


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
def test_images_are_those_of_the_evaluation(generate, tiny_folder, tmp_path, name, capsys):
    guidance = {"flux": 3.5, "qwen_image_edit": 4.0}[name]
    policy = load(name, tiny_folder(name), guidance_scale=guidance)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    save_peft(policy, tmp_path / "adapter")
    picture(1, 48, 48).save(tmp_path / "a.png")
    picture(2, 40, 90).save(tmp_path / "b.png")
    images = []
    if name in EDITORS:
        images = ["--image", tmp_path / "a.png", "--image", tmp_path / "b.png"]
    if name == "qwen_image_edit":  # with true CFG, which the toy configuration does not use
        images += [
            f"--config.sample.guidance_scale={guidance}",
            "--config.sample.negative_prompt= ",
        ]
    prompts = ["--prompt", "make it blue", "--prompt", "1x2 [LEFT]: a. [RIGHT]: b."]
    more = [*prompts, "--seeds", "0,7", "--adapter", tmp_path / "adapter", *images]
    status = generate.main(arguments(name, tiny_folder(name), *more, "--output", tmp_path / "out"))
    assert status == 0, capsys.readouterr().err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"sheet.png", *(f"0000{i}_seed{seed}.png" for i in (0, 1) for seed in (0, 7))}

    reference = Image.open(tmp_path / "a.png") if name in EDITORS else None
    (expected,) = draw(policy, [Item(0, "make it blue", references=(reference,))], [7], 32, 32, 2)
    with Image.open(tmp_path / "out" / "00000_seed7.png") as image:
        assert np.abs(np.asarray(image, np.int16) - np.asarray(expected, np.int16)).max() <= 1
    if name in EDITORS:  # sampled in the shape of its reference
        with Image.open(tmp_path / "out" / "00001_seed0.png") as image:
            assert image.width > image.height


def test_items_with_and_without_an_image(generate, tiny_folder, tmp_path):
    """A model that takes any number of references: the sheet shows each image beside its own."""
    picture(1).save(tmp_path / "a.png")
    rows = [{"prompt": "x"}, {"prompt": "y", "image": "a.png"}]
    (tmp_path / "test_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--prompts-file", tmp_path / "test_metadata.jsonl", "--output", tmp_path / "out"]
    more.append("--config.sample.guidance_scale=4")
    assert generate.main(arguments("flux2", tiny_folder("flux2"), *more)) == 0
    assert (tmp_path / "out" / "sheet.png").is_file()


def test_images_of_an_earlier_command_are_kept(generate, tiny_folder, tmp_path, capsys):
    command = arguments("flux", tiny_folder("flux"), "--prompt", "x", "--output", tmp_path / "out")
    assert generate.main(command) == 0
    image = tmp_path / "out" / "00000_seed0.png"
    content = image.read_bytes()
    assert generate.main([*command, "--config.seed=1"]) == 2
    assert "00000_seed0.png is there already" in capsys.readouterr().err
    assert image.read_bytes() == content
    assert generate.main([*command, "--seeds", "1,2"]) == 0  # other files
    assert generate.main([*command, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("flux", "--prompt x --image FOLDER/a.png", "reference images"),
        ("flux", "--prompt x --best 1", "--judge"),
        ("flux", "--prompt x --judge http://127.0.0.1:1", "needs a grid"),
        (
            "flux_kontext",
            "--prompt x --prompt x --prompt x --image FOLDER/a.png --image FOLDER/a.png",
            "--image is given 2",
        ),
        ("flux", "--prompts-file FOLDER/broken.jsonl", "broken.jsonl:1: field 'prompt'"),
        ("flux_kontext", "--prompts-file FOLDER/number.jsonl", "image must be a file name"),
        ("flux_kontext", "--prompts-file FOLDER/numbers.jsonl", "image must be a file name"),
        ("flux", "--prompt x --adapter FOLDER/none", "--adapter"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    generate, tiny_folder, tmp_path, capsys, name, words, named
):
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": "x", "image": 5}\n')
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "x", "images": 5}\n')
    words = words.replace("FOLDER", str(tmp_path)).split()
    command = arguments(name, tiny_folder(name), *words, "--output", tmp_path / "out")
    assert generate.main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert named in error
    for seeds in ("0", "1,-1", "x", "0,0", "3,1,3", "1000000000", "99999999999999999999"):
        with pytest.raises(SystemExit, match="2"):
            generate.main(["--prompt", "x", f"--seeds={seeds}"])
    assert not (tmp_path / "out").exists()
