"""The reward function of verl-omni asks what the rewards ask."""

import asyncio
import math
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from fakes import fake_judge
from wired import IMAGES, ITEMS, respond

from paco_grpo.rewards.registry import build_rewards
from paco_judge.images import encode
from paco_judge.verl_omni import consistency


@pytest.fixture
def server():
    with fake_judge.FakeJudge(respond) as judge:
        yield judge


def ask(server, images, prompts, extra):
    """A batch as verl-omni asks it: all samples together."""

    async def gather():
        calls = []
        for image, prompt, more in zip(images, prompts, extra, strict=True):
            call = consistency("paco", image, prompt, more, base_url=server.url)
            calls.append(call)
        return await asyncio.gather(*calls)

    return [answer["score"] for answer in asyncio.run(gather())]


def test_grids_and_edits_are_scored_as_by_the_rewards(server):
    names = ("consistency_score", "consistency_for_editing")
    kwargs = {name: {"base_url": server.url} for name in names}
    rewards = build_rewards(dict.fromkeys(names, 1.0), kwargs)
    arrays = [np.moveaxis(np.asarray(image), -1, 0) for image in IMAGES[:4]]
    arrays[1] = np.stack([arrays[1], 0 * arrays[1]])  # of several images the first counts
    arrays[2] = np.clip(arrays[2] - 0.4, 0, 255) / 255  # a decoder's values lie between the bytes
    prompts = [item.prompt for item in ITEMS[:4]]
    scores = ask(server, arrays, prompts, [None, {}, {"split": "train"}, {}])
    assert scores == pytest.approx(rewards[names[0]](IMAGES[:4], ITEMS[:4]))
    edits = []
    for item in ITEMS[:4]:
        edits.append({"source_img": item.image, "instruction": item.prompt})
    del edits[1]["instruction"]
    edits[2]["source_img"] = {"bytes": encode(ITEMS[2].image), "path": None}
    edits[3]["source_img"] = torch.tensor(np.asarray(ITEMS[3].image))  # height, width, colors
    prompts[0] = "is not asked about"
    scores = ask(server, arrays, prompts, edits)
    assert scores == pytest.approx(rewards[names[1]](IMAGES[:4], ITEMS[:4]))
    assert len(set(scores)) == 4 and not any(map(math.isnan, scores))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (torch.full((3, 8, 16), torch.inf, dtype=torch.bfloat16), "not finite"),
        (np.linspace(-1, 1, 384).reshape(3, 8, 16), "-1 to 1"),
        (np.full((3, 8, 16), 1.003), "1.003"),
        (torch.full((3, 8, 16), 200), "int64"),
        (np.zeros((1, 8, 16), np.uint8), "(1, 8, 16)"),
        (np.zeros((0, 3, 8, 16), np.uint8), "(0, 3, 8, 16)"),
        (np.zeros((8, 16), np.uint8), "(8, 16)"),
    ],
)
def test_what_is_no_picture_has_no_score(server, values, named):
    """A generator that breaks must not be rewarded; nor is another picture the source of an edit."""
    with pytest.raises(ValueError, match=re.escape(named)):
        ask(server, [values], [ITEMS[0].prompt], [None])
    edit = {"source_img": values, "instruction": "x"}
    with pytest.raises(ValueError, match=re.escape(named)):
        ask(server, [np.zeros((3, 8, 16), np.uint8)], ["x"], [edit])
    assert not server.requests


def test_a_picture_has_one_score_in_every_form(server):
    """Also with values that rounding moved out of [0, 1], and in bfloat16 where it is exact."""
    pixels = np.asarray(IMAGES[0].point(lambda value: value // 128 * 255))
    planes = np.moveaxis(pixels, -1, 0)
    floats = torch.tensor(planes / 255.0)
    forms = [pixels, torch.tensor(pixels), planes[None], floats, floats.bfloat16(), floats.half()]
    forms.append(np.where(planes == 255, 1.0019, -0.0019))
    scores = ask(server, forms, [ITEMS[0].prompt] * len(forms), [None] * len(forms))
    assert len(set(scores)) == 1


def test_edits_as_verl_omni_prepares_them_get_their_source(server, tmp_path, monkeypatch):
    """By the lines of the page."""
    rows = []
    for index, item in enumerate(ITEMS[:3]):
        extra = {"instruction": item.prompt, "image": f"{index}.png", "index": index}
        rows.append({"images": [{"bytes": encode(item.image)}], "extra_info": extra})
    for name in ("train.parquet", "test.parquet"):
        pandas.DataFrame(rows).to_parquet(tmp_path / name)
    arrays = [np.asarray(image) for image in IMAGES[:3]]
    with pytest.raises(ValueError, match="source_img"):
        ask(server, arrays[:1], ["make it blue"], [rows[0]["extra_info"]])
    page = Path(__file__).parents[3] / "docs" / "other-trainers.md"
    (lines,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})  # noqa: S102 - as a reader runs them
    reward = "consistency_for_editing"
    rewards = build_rewards({reward: 1.0}, {reward: {"base_url": server.url}})
    expected = rewards[reward](IMAGES[:3], ITEMS[:3])
    for name in ("train.parquet", "test.parquet"):
        extra = list(pandas.read_parquet(name)["extra_info"])
        assert ask(server, arrays, ["x"] * 3, extra) == pytest.approx(expected)


def test_a_missing_score_is_an_error_and_not_0(server):
    pixels = np.zeros((3, 32, 64), dtype=np.uint8)
    with pytest.raises(ValueError, match="a cat"):
        ask(server, [pixels], ["a cat"], [None])
    server.respond = lambda number, request: (400, {}, {})
    with pytest.raises(RuntimeError, match="no score"):
        ask(server, [pixels], [ITEMS[0].prompt], [None])
