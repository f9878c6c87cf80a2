"""The reward function of verl-omni asks what the rewards ask."""

import asyncio
import math

import numpy as np
import pytest
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
    prompts[0] = "is not asked about"
    scores = ask(server, arrays, prompts, edits)
    assert scores == pytest.approx(rewards[names[1]](IMAGES[:4], ITEMS[:4]))
    assert len(set(scores)) == 4 and not any(map(math.isnan, scores))


def test_a_missing_score_is_an_error_and_not_0(server):
    pixels = np.zeros((3, 32, 64), dtype=np.uint8)
    with pytest.raises(ValueError, match="a cat"):
        ask(server, [pixels], ["a cat"], [None])
    server.respond = lambda number, request: (400, {}, {})
    with pytest.raises(RuntimeError, match="no score"):
        ask(server, [pixels], [ITEMS[0].prompt], [None])
