"""docs/product.md: its commands as printed, and what examples/product.py writes, trained."""

import json
import re
import runpy

import pytest
from fakes import fake_judge
from PIL import Image
from terminal import REPOSITORY, TOY_SIZE, check_learning
from test_readmes import TOY_CONFIG
from tiny_policies import build, picture
from tiny_run import ROOT, overrides_for, rows_of, train, write_edits

from paco_grpo.data.prompts import load_prompts
from paco_grpo.options import load_options
from paco_judge.errors import UserError

BOXES = {"back.png": [4, 0, 20, 24], "front.jpg": [8, 2, 40, 30]}  # pixels
SCENES = [f"show it in place {number}" for number in range(11)]


def write_photos(folder, **boxes):
    """Three photos of 48x32, 32x40 and 64x32 pixels; the second one is stored turned."""
    folder.mkdir()
    (folder / "._front.jpg").write_bytes(b"of macOS")
    picture(1, 32, 48).save(folder / "front.jpg")
    turned = picture(2, 40, 32).transpose(Image.Transpose.ROTATE_90)
    turned.save(folder / "back.png", exif=_turned_by(6))
    picture(3, 32, 64).save(folder / "side.png")
    (folder / "boxes.json").write_text(json.dumps(BOXES | boxes))
    (folder / "scenes.txt").write_text("\n\n".join(SCENES))


def _turned_by(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


WRITE = runpy.run_path(str(REPOSITORY / "examples" / "product.py"))["write"]


def write_set(photos, references=1):
    """What examples/product.py makes of ``write_photos``."""
    WRITE(photos, photos / "scenes.txt", photos / "set", references)
    return photos / "set"


def test_a_scene_with_each_photo_and_the_next_ones_is_an_item(tmp_path):
    folder = tmp_path / "photos"
    write_photos(folder)
    prompts = write_set(folder, references=2)
    items = load_prompts(prompts, "train", "geneval_image")
    held_out = load_prompts(prompts, "test", "geneval_image")
    assert [item.prompt for item in held_out[::3]] == [SCENES[4], SCENES[9]]
    assert [item.prompt for item in items[::3]] == [*SCENES[:4], *SCENES[5:9], SCENES[10]]
    sizes = [[crop.size for crop in item.load().crops] for item in held_out]
    back, front, side = (16, 24), (32, 28), (64, 32)
    assert sizes == [[back, front], [front, side], [side, back]] * 2


@pytest.mark.parametrize(
    ("boxes", "references", "named"),
    [
        ({"front.jpg": [8, 2, 49, 30]}, 1, "48x32"),
        ({"back.png": [4, 0, 33, 24]}, 2, "32x40"),  # upright
        ({"top.png": [0, 0, 1, 1]}, 3, "top.png"),
        ({"front.jpg": [0.1, 0.1, 0.9, 0.8]}, 1, "front.jpg"),  # shares
        ({"side.png": [1, 2, 30]}, 1, "side.png"),
        ({}, 4, "3 photos"),
    ],
)
def test_photos_that_do_not_fit_are_named(tmp_path, boxes, references, named):
    write_photos(tmp_path / "photos", **boxes)
    with pytest.raises(UserError, match=named) as error:
        write_set(tmp_path / "photos", references)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_editor_of_several_photos_trains_on_their_boxes(tmp_path):
    folder = tmp_path / "photos"
    write_photos(folder)
    prompts = write_set(folder, references=2)
    with fake_judge.FakeJudge(fake_judge.by_content) as judge:
        reward = "train__reward_fn_kwargs__consistency_for_editing"
        changes = {"dataset": prompts, "num_epochs": 1}
        changes |= {f"{reward}__base_url": judge.url, f"{reward}__model": judge.models[0]}
        model = build("flux2_klein", tmp_path / "klein")
        overrides = overrides_for(model, tmp_path, write_edits, **changes)
        for name in ("train.reward_fn", "train.reward_fn_kwargs"):
            del overrides[name]
        configuration = f"{ROOT / 'config' / 'grpo.py'}:toy_kontext_product"
        run = train(load_options(configuration, overrides.items())).run
        asked = list(map(fake_judge.request_content, judge.requests))
    (row,) = rows_of(run.options, "train")
    assert row["reward/missing_share"] == 0
    assert row["reward/consistency_for_editing_std"] > 0
    kept = [images for images, text in asked if "object" in text]
    followed = [images for images, text in asked if "instruction" in text]
    crops = {(16, 24), (32, 28), (64, 32)}
    assert {images[0].size for images in kept} == crops
    whole = {(32, 40), (48, 32), (64, 32)}
    assert {image.size for images in followed for image in images[:-1]} == whole
    assert {len(images) for images in kept} == {2}


PAGE = """
klein_editing = _toy(kontext_editing)
SUFFIXES["_24gb"] = lambda config: None
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page(terminal, open_clip):
    clone = terminal.clone
    trainer = clone / "PaCo-GRPO"
    write_photos(trainer / "photos")
    (trainer / "photos" / "scenes.txt").rename(trainer / "scenes.txt")
    (trainer / "others").mkdir()
    picture(7, 40, 24).save(trainer / "others" / "a.png")
    text = (REPOSITORY / "docs" / "product.md").read_text()
    outputs = []
    with fake_judge.FakeJudge(fake_judge.by_content, ["PaCo-Reward-7B"]) as judge:
        port = judge.url.rpartition(":")[2]
        toy = TOY_CONFIG.replace("PORT", port).replace("OPEN_CLIP", open_clip)
        with (trainer / "config" / "grpo.py").open("a") as file:
            file.write(toy.replace("SIZES", repr(TOY_SIZE)) + PAGE)
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            block = block.replace("http://127.0.0.1:8000", judge.url)
            outputs.append(terminal.run("conda activate paco-grpo\n" + block, "PaCo-GRPO"))
    assert "train: 27 items" in outputs[0]
    assert "same product: 6 pairs" in outputs[1]
    assert "other product: 3 pairs" in outputs[1]
    check_learning(trainer / "runs" / "product", "consistency_for_editing")
    assert (trainer / "generated" / "00000_seed0.png").is_file()
