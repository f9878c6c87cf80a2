"""The oracle votes on a run's page."""

import numpy as np
from PIL import Image

import votes
from paco_grpo.item import Item
from paco_grpo.rewards import people
from paco_grpo.rewards.contract import RewardRun
from paco_judge.files import read_json_lines, write_json_lines
from paco_toy.world import CHARACTERS, VIEWS, grid_prompt, render_grid, to_image


def grid(*characters: int) -> Image.Image:
    return to_image(render_grid([CHARACTERS[c] for c in characters], list(VIEWS[:4]), 32))


def test_what_the_oracle_likes(tmp_path, monkeypatch):
    """Panels that agree, and that show what the prompt names; a run's rows count such votes."""
    monkeypatch.setattr(votes, "WRONG", 0.0)
    reward = people.votes(port=0)
    reward.begin(RewardRun(tmp_path, 0, 1, lambda value: value))
    item = Item(2, grid_prompt(CHARACTERS[9], list(VIEWS[:4])))
    images = [grid(9, 9, 9, 9), grid(9, 9, 4, 9), grid(4, 4, 4, 4)]
    reward.show(images, [item] * 3, [31, 32, 33], 1)
    log = tmp_path / "log"
    log.write_text(reward._server.announcement())
    votes.Voter(log, seed=0).vote()
    assert not reward.is_waiting()
    assert reward(images, [item] * 3, [33, 32, 31], 1).tolist() == [0, 0, 1]
    reward.close()
    assert len(read_json_lines(tmp_path / "votes.jsonl")) == 3

    both = {"oracle_consistency_mean": 0.25, "oracle_alignment_mean": 0.75}
    rows = [{"phase": "eval", "epoch": 0}, {"phase": "train", "epoch": 1}]
    rows += [{"phase": "eval", "epoch": 1}]
    for row in rows:
        group = "eval" if row["phase"] == "eval" else "reward"
        row |= {f"{group}/{name}": value + row["epoch"] / 8 for name, value in both.items()}
    write_json_lines(tmp_path / "metrics.jsonl", rows)
    measured = votes.measures(tmp_path)
    assert [(row["images"], row["votes"]) for row in measured] == [
        ("test", 0),
        ("train", 0),
        ("test", 3),
    ]
    assert np.array([row["alignment"] for row in measured]).tolist() == [0.75, 0.875, 0.875]
