"""scripts/generate.py draws the evaluation's images with every policy; refuses wrong arguments."""

import json

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image
from tiny_policies import EDITORS, disturb, draw, load, picture
from tiny_run import ROOT, as_arguments, load_script

from paco_grpo.policies.adapters import add_lora, save_peft
from paco_grpo.rewards.registry import build_rewards
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
    (tmp_path / "prompts.txt").write_text("1x2 [LEFT]: a. [RIGHT]: b.\n\n")
    prompts = ["--prompt", "make it blue", "--prompts_file", tmp_path / "prompts.txt"]
    more = [*prompts, "--seeds", "0,7", "--adapter", tmp_path / "adapter", *images]
    status = generate.main(arguments(name, tiny_folder(name), *more, "--output", tmp_path / "out"))
    assert status == 0, capsys.readouterr().err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"sheet.png", *(f"0000{i}_seed{seed}.png" for i in (0, 1) for seed in (0, 7))}

    prompts = ("make it blue", "1x2 [LEFT]: a. [RIGHT]: b.")
    references = [(), ()]
    if name in EDITORS:
        references = [(Image.open(tmp_path / file),) for file in ("a.png", "b.png")]
    for number, prompt in enumerate(prompts):
        item = Item(number, prompt, references=references[number])
        for seed in (0, 7):
            image = Image.open(tmp_path / "out" / f"0000{number}_seed{seed}.png")
            assert (image.width > image.height) is (name in EDITORS and number == 1)
            (expected,) = draw(policy, [item], [seed], image.height, image.width, 2)
            difference = np.asarray(image, np.int16) - np.asarray(expected, np.int16)
            assert np.abs(difference).max() <= 1


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
        ("flux_kontext", "--prompt x --image FOLDER/none.png", "none.png"),
        ("flux", "--prompts_file FOLDER/none.txt", "none.txt"),
        ("flux", "--prompt x --adapter FOLDER/none", "--adapter"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    generate, tiny_folder, tmp_path, capsys, name, words, named
):
    picture(1).save(tmp_path / "a.png")
    words = words.replace("FOLDER", str(tmp_path)).split()
    command = arguments(name, tiny_folder(name), *words, "--output", tmp_path / "out")
    assert generate.main(command) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert named in error
    for seeds in ("0", "1,-1", "x", "3,1,3", "0,99999999999999999999"):
        with pytest.raises(SystemExit, match="2"):
            generate.main(["--prompt", "x", f"--seeds={seeds}"])
    assert not (tmp_path / "out").exists()


def test_generated_images_are_scored_by_a_judge(trained_run, tmp_path, capsys):
    checkpoint = trained_run.folder / "checkpoints" / "epoch_0002"
    out = tmp_path / "out"
    main = load_script("generate").main
    kwargs = {"consistency_score": {"model": "Paco-Reward-7B", "port": 1}}
    arguments = ["--config", str(checkpoint.parents[1] / "saved.yaml")]
    arguments += ["--adapter", str(checkpoint), "--seeds", "3", "--output", str(out)]
    arguments += ["--prompt", "1x2 grid. [LEFT]: a. [RIGHT]: b."]
    row = {"prompt": "2x1 grid. [TOP]: a. [BOTTOM]: b.", "idx": "7"}
    (tmp_path / "test_metadata.jsonl").write_text(f"{json.dumps(row)}\n")
    arguments += ["--prompts_file", str(tmp_path / "test_metadata.jsonl")]
    arguments.append(f"--config.train.reward_fn_kwargs={kwargs}")

    def respond(number, request):
        """The question at the start is answered, the next one is not."""
        return (400, {}, {}) if number == 2 else fake_judge.by_content(number, request)

    with fake_judge.FakeJudge(respond) as judge:
        assert main([*arguments, "--judge", judge.url, "--best", "1"]) == 0
        rows = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
        own = build_rewards(
            {"consistency_score": 1.0}, {"consistency_score": {"base_url": judge.url}}
        )
        for row in rows:
            if row["kept"]:
                image = Image.open(out / row["file"])
                (score,) = own["consistency_score"]([image], [Item(0, row["prompt"])])
                assert row["judge"] == pytest.approx(score)
    assert [row["file"] for row in rows] == [
        f"0000{item}_seed{seed}.png" for item in (0, 1) for seed in range(3)
    ]
    assert sum(row["judge"] is None for row in rows) == 1
    best = [max(three, key=lambda row: row["judge"] or 0)["file"] for three in (rows[:3], rows[3:])]
    assert [row["file"] for row in rows if row["kept"]] == best
    assert {path.name for path in out.glob("0*.png")} == set(best)
    with Image.open(out / "sheet.png") as sheet:
        width, height = sheet.size
    assert 3 * height > 2 * width  # two rows of three, with a line below each picture
    assert main([*arguments, "--judge", judge.url]) == 1
    assert judge.url in capsys.readouterr().err
