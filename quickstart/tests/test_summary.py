"""summary.json's numbers."""

import numpy as np
import pytest

from paco_toy.summary import policy_measures, table
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    grid_prompt,
    opened,
    render_grid,
    to_image,
    write_jsonl,
)


def evaluation(run, epoch, rewards, characters=None, named=None):
    """An evaluation, of drawn images or of edits."""
    (run / "config.yaml").write_text("train: {resolution: 64}\ntest: {resolution: 128}\n")
    folder = run / "eval" / f"epoch_{epoch:04d}"
    folder.mkdir(parents=True)
    rows = [{"prompt": "p", "rewards": each, "file": f"{i}.png"} for i, each in enumerate(rewards)]
    for row, panels, character in zip(rows, characters or (), named or ()):
        to_image(render_grid([CHARACTERS[c] for c in panels], VIEWS[:4], 32)).save(
            folder / row["file"]
        )
        row["prompt"] = grid_prompt(character, VIEWS[:4])
    write_jsonl(folder / "eval_data.jsonl", rows)


def test_measures_are_of_the_prompts_that_they_apply_to(tmp_path):
    named = [
        CHARACTERS[0],
        CHARACTERS[0],
        opened(CHARACTERS[0], ("style", "colour")),
        opened(CHARACTERS[5], ("colour",)),
    ]
    shown = {
        0: [[0, 0, 1, 1], [0, 1, 2, 3], [0, 5, 10, 15], [5, 5, 0, 0]],
        2: [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 10, 10], [10, 10, 10, 10]],
    }
    for epoch, characters in shown.items():
        evaluation(
            tmp_path, epoch, [{"consistency_score": 0.4 + epoch / 10}] * 4, characters, named
        )
    found = policy_measures(tmp_path)
    assert found["before"]["consistency"] == pytest.approx(1 / 6) and found["after"][
        "consistency"
    ] == pytest.approx(3 / 4)
    agreement = {when: found[when]["agreement"] for when in ("before", "after")}
    assert agreement == pytest.approx({"before": (0 + 2 / 6) / 2, "after": (2 / 6 + 1) / 2})
    differences = np.array([2 / 6, 4 / 6])
    assert found["change"]["agreement"] == pytest.approx(
        {"mean": differences.mean(), "stderr": differences.std(ddof=1) / 2**0.5}
    )
    assert found["change"]["choice"]["stderr"] > 0 and found["change"]["reward"][
        "mean"
    ] == pytest.approx(0.2)
    assert (
        found["epochs"],
        found["num_images"],
        found["train_resolution"],
        found["test_resolution"],
    ) == (2, 4, 64, 128)

    (tmp_path / "eval").rename(tmp_path / "other")
    for epoch, characters in shown.items():
        evaluation(tmp_path, epoch, [{"jpeg_compressibility": -1.0}] * 4, characters, named)
    assert "reward" not in policy_measures(tmp_path)["change"]


def test_the_change_of_edits_is_paired(tmp_path):
    before, after = [0.0, 0.0, 1.0, 0.5], [1.0, 0.0, 1.0, 1.0]
    for epoch, scores in ((0, before), (7, [0.0] * 4), (12, after)):
        evaluation(
            tmp_path,
            epoch,
            [{"oracle_edit": s, "oracle_followed": s, "oracle_kept": 1.0} for s in scores],
        )
    found = policy_measures(tmp_path)
    assert (found["before"]["oracle_edit"], found["after"]["oracle_edit"], found["epochs"]) == (
        0.375,
        0.75,
        12,
    )
    stderr = np.subtract(after, before).std(ddof=1) / 2
    assert found["change"]["oracle_edit"] == pytest.approx({"mean": 0.375, "stderr": stderr})
    assert "+0.375 ±0.239" in table({"policy": found, "minutes": 8})
