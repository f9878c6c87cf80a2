"""A reward whose package is not here, in a real environment of its own: EditScore behind the service."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image
from serving_reward import ROOT, free_port, remote, running

from paco_grpo.rewards.registry import RewardError, build_rewards
from paco_grpo.types import Item
from paco_judge.images import png_data_url

COLORS = {"red": 4, "blue": 20, "green": 25, "black": 10}  # color of the edit -> what the stand-in for EditScore says


def says(number, request):
    """Answers as EditScore does: reasons and two scores of 25; nonsense about black images."""
    parts = request["messages"][0]["content"]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    color = COLOR_OF[pictures[-1]]
    scores = [COLORS[color], 24] if len(pictures) == 2 else [23, 22]
    assert texts[:-1] == [f"<img{i + 1}>: " for i in range(len(pictures))]
    assert ("Editing instruction: paint it" in texts[-1]) == (len(pictures) == 2)
    assert "scale 0 to 25" in texts[-1]
    text = "I cannot say." if color == "black" else json.dumps({"reasoning": "as it is", "score": scores})
    return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}, {}


COLOR_OF: dict[str, str] = {}


@pytest.mark.long
def test_edit_score_runs_in_its_own_environment(tmp_path):

    with pytest.raises(RewardError, match="not installed.*reward_service.sh edit_score"):
        build_rewards({"edit_score": 1.0})
    images = [Image.new("RGB", (16, 16), color) for color in COLORS]
    COLOR_OF.update({png_data_url(image): color for image, color in zip(images, COLORS, strict=True)})
    items = [Item(i, "paint it", image=Image.new("RGB", (16, 16), "white")) for i in range(len(images))]
    port = free_port()
    with fake_judge.FakeJudge(says, models=["EditScore-7B"]) as judge:
        command = ["bash", str(ROOT / "scripts" / "reward_service.sh"), "edit_score", "--port", str(port)]
        command += ["--kwargs", json.dumps({"base_url": judge.url})]
        environment = {"PYTHON": sys.executable, "REWARD_ENVIRONMENT": str(tmp_path / "env")}
        with running(command, f"http://127.0.0.1:{port}", seconds=400, **environment) as url:
            reward = remote("edit_score", url)
            reward.check()
            scores = reward(images, items)
    expected = [math.sqrt(min(COLORS[c], 24) / 25 * 22 / 25) for c in COLORS if c != "black"]
    assert scores[:3] == pytest.approx(expected)
    assert np.isnan(scores[3])
    check = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('editscore', 'torch', 'diffusers')])"
    inside = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-c", check], check=True, capture_output=True, text=True
    )
    assert inside.stdout.strip() == "[True, False, False]"
