"""Local scorers with tiny weights of the same architectures, against a direct computation."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from paco_grpo.rewards.clip import (
    ClipScore,
    PickScore,
    open_clip_model,
    reference_clipI,
    subfig_clipI,
    subfig_clipT,
)
from paco_grpo.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item
from paco_judge.errors import UserError
from paco_judge.grid import split_image

RNG = np.random.default_rng(0)
PROMPT = "1x2 grid of a cat. [LEFT]: asleep. [RIGHT]: awake."
IMAGES = [Image.fromarray(RNG.integers(0, 255, (32, 64, 3), dtype=np.uint8)) for _ in range(3)]
ITEMS = [Item(0, PROMPT), Item(1, PROMPT.replace("cat", "dog")), Item(0, PROMPT)]


@pytest.mark.parametrize(("factory", "scale"), [(PickScore, 26), (ClipScore, 30)])
def test_whole_image_scores_are_scaled_cosines_and_a_prompt_is_encoded_once(
    clip_folder, factory, scale, monkeypatch
):
    from transformers import CLIPModel, CLIPProcessor

    reward = factory(model=clip_folder, processor=clip_folder, batch_size=2)
    assert reward._model is None  # nothing is loaded early
    scores = reward(IMAGES, ITEMS)
    monkeypatch.setattr(reward._model.text_model, "forward", None)  # not needed any more
    assert np.array_equal(reward(IMAGES, ITEMS), scores)
    model, processor = (
        CLIPModel.from_pretrained(clip_folder).eval(),
        CLIPProcessor.from_pretrained(clip_folder),
    )
    for image, item, score in zip(IMAGES, ITEMS, scores, strict=True):
        inputs = processor(text=[item.prompt], images=[image], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            assert score == pytest.approx(model(**inputs).logits_per_image.item() / scale, rel=1e-5)


@torch.no_grad()
def test_panels_are_compared_with_their_texts_and_with_each_other(tiny_open_clip):
    """The model is loaded once for both."""
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(
        tiny_open_clip[0], pretrained=tiny_open_clip[1]
    )
    model.eval()
    prompt = "1x3 grid of a cat. [LEFT]: a. [MIDDLE]: b. [RIGHT]: c."
    texts = torch.nn.functional.normalize(
        model.encode_text(open_clip.get_tokenizer(tiny_open_clip[0])(["a.", "b.", "c."]))
    )
    items = [Item(i, prompt) for i in range(3)]
    with_panels, with_each_other = subfig_clipT(*tiny_open_clip), subfig_clipI(*tiny_open_clip)
    shared = open_clip_model(*tiny_open_clip, torch.device("cpu"), "float32")
    assert with_panels.check.__self__ is with_each_other.check.__self__ is shared
    of_half_size = subfig_clipT(*tiny_open_clip, dtype="bfloat16").check.__self__
    assert of_half_size.dtype == torch.bfloat16
    for image, panels, pairs in zip(
        IMAGES, with_panels(IMAGES, items), with_each_other(IMAGES, items), strict=True
    ):
        pixels = torch.stack([preprocess(cell) for cell in split_image(image, 1, 3)])
        cells = torch.nn.functional.normalize(model.encode_image(pixels))
        assert panels == pytest.approx((cells * texts).sum(dim=1).mean().item(), abs=1e-6)
        assert pairs == pytest.approx(
            np.mean([(a @ b).item() for a, b in itertools.combinations(cells, 2)]), abs=1e-6
        )


def test_an_edit_is_compared_with_all_of_its_references(tiny_open_clip):
    reward = reference_clipI(*tiny_open_clip)
    clip = open_clip_model(*tiny_open_clip, torch.device("cpu"), "float32")
    first, second, edited = clip.images(IMAGES, 3)
    expected = (first @ edited + second @ edited) / 2
    item = Item(0, "edit", references=tuple(IMAGES[:2]))
    assert reward(IMAGES[2:], [item]) == pytest.approx([expected.item()], abs=1e-6)
    (part,) = clip.images([IMAGES[1].crop((0, 0, IMAGES[1].width // 2, IMAGES[1].height))], 3)
    item = replace(item, metadata={"reference_boxes": [None, [0, 0, 0.5, 1]]})
    expected = (first @ edited + part @ edited) / 2
    assert reward(IMAGES[2:], [item]) == pytest.approx([expected.item()], abs=1e-6)
    with pytest.raises(ValueError, match="reference_clipI"):
        reference_clipI.check_item(Item(0, "no reference"))


LONG = "one " * 75 + "two"  # 76 words, and a first and a last token
GRIDS = ("1x2 grid. [LEFT]: a. [RIGHT]: {}.", "a cat, {}.", "1x2 grid. [LEFT]: {}. [RIGHT]: b.")


@pytest.mark.parametrize("name", ["pickscore", "subfig_clipT"])
def test_prompts_that_clip_does_not_read_to_the_end_are_counted(
    clip_folder, tiny_open_clip, name, caplog
):
    kwargs = {"model": clip_folder, "processor": clip_folder}
    if name == "subfig_clipT":
        kwargs = dict(zip(("model", "pretrained"), tiny_open_clip, strict=True))
    (reward,) = build_rewards({name: 1.0}, {name: kwargs}).values()
    fits = LONG.removeprefix("one one ")  # 76 tokens, and one for the panel's period
    prompts = [GRIDS[0].format(fits), GRIDS[1].format(LONG), GRIDS[2].format(LONG), "a cat"]
    reward.prove([Item(number, prompt) for number, prompt in enumerate(prompts)])
    longer = 2 if name == "subfig_clipT" else 3  # which reads each panel alone
    assert f"{name}: {longer} of 4 prompts" in caplog.text


@pytest.mark.parametrize(
    ("reward", "script"), [("pickscore", "pickscore_scores"), ("subfig_clipT", "subfig_clipT")]
)
def test_missing_weights_name_the_download_command(reward, script, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=f"paco_grpo/rewards/{script}.py"):
        build_rewards({reward: 1.0})[reward].check()


@pytest.mark.parametrize("options", [{}, {"quality": 60}])
def test_jpeg_rewards_are_the_size_of_a_file(tmp_path, options):
    scores = jpeg_incompressibility(**options)(IMAGES, ITEMS)
    for image, score in zip(IMAGES, scores, strict=True):
        image.save(tmp_path / "x.jpg", **{"quality": 95} | options)
        assert score == pytest.approx((tmp_path / "x.jpg").stat().st_size / 1000 / 500)
    assert np.array_equal(jpeg_compressibility(**options)(IMAGES, ITEMS), -scores)
