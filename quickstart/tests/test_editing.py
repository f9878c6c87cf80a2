"""The command quickstart/editing.sh: its measures, and (long) one whole run."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paco_toy import editing
from paco_toy.processes import QuickstartError

REPO = Path(__file__).resolve().parents[2]


def evaluation(run, epoch, edit, categories):
    folder = run / "eval" / f"epoch_{epoch:04d}"
    folder.mkdir(parents=True)
    rows = [{"file": f"{i:05d}.png", "category": category, "rewards": {"oracle_edit": score, "oracle_followed": score, "oracle_kept": 1.0}}
            for i, (score, category) in enumerate(zip(edit, categories, strict=True))]  # fmt: skip
    (folder / "eval_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_gain_is_paired_over_edits(tmp_path):
    before, after = [0.0, 0.0, 1.0, 0.5], [1.0, 0.0, 1.0, 1.0]
    evaluation(tmp_path, 0, before, ["a", "b", "a", "b"])
    evaluation(tmp_path, 7, [0.0] * 4, ["a", "b", "a", "b"])  # one in between does not count
    evaluation(tmp_path, 12, after, ["a", "b", "a", "b"])
    found = editing.measure(tmp_path)
    assert list(found) == ["all", "a", "b"] and found["a"]["num_images"] == 2
    edit, difference = found["all"]["oracle_edit"], np.subtract(after, before)
    assert edit["gain"] == pytest.approx(0.375) and edit["before"] == 0.375 and edit["after"] == 0.75
    assert edit["gain_stderr"] == pytest.approx(difference.std(ddof=1) / 2)
    assert found["a"]["oracle_edit"]["gain"] == 0.5 and found["b"]["oracle_kept"]["gain"] == 0
    text = editing.table(found, {"test_resolution": 128, "train_resolution": 64})
    assert "+0.375 ±0.239" in text and "result is a b" in text


def test_evaluations_that_cannot_be_compared_are_named(tmp_path):
    evaluation(tmp_path, 0, [0.0, 1.0], ["a", "b"])
    with pytest.raises(QuickstartError, match="has 1"):
        editing.measure(tmp_path)
    evaluation(tmp_path, 1, [0.0, 1.0], ["b", "b"])
    with pytest.raises(QuickstartError, match="eval"):
        editing.measure(tmp_path)


def test_a_missing_base_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(editing, "REPO", tmp_path)
    assert editing.main(["--out", str(tmp_path / "out")]) == 1
    assert "toy_models.build flux_kontext" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_small_run_by_its_command(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")}
    command = ["bash", "quickstart/editing.sh", "--minutes", "0.2", "--out", str(tmp_path / "out"), "--config.test.num_images=8",
               "--config.sample.unique_sample_num_per_epoch=2", "--config.sample.num_images_per_prompt=4",
               "--config.eval_freq=0"]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, env=env, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "editing_flux_kontext.json").read_text())
    assert found["measures"]["all"]["num_images"] == 8 and (found["train_resolution"], found["test_resolution"]) == (64, 64)
    page = (tmp_path / "out" / "editing_flux_kontext.html").read_text()
    assert page.count("<article>") == 8 and page.count("<em>reference</em>") == 8
    assert "Edit score" in done.stdout
