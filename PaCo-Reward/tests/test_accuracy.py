"""``paco-reward accuracy``."""

import json
import shutil
from pathlib import Path

import pytest

from paco_judge.errors import UserError
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs
from paco_reward.metrics import judge_report


@pytest.fixture
def arguments(judge_dir, data_dir) -> list[str]:
    options = {"--model": judge_dir, "--dataset_dir": data_dir, "--dataset": "held_out,held_out"}
    return ["accuracy", *(str(word) for option in options.items() for word in option)]


def test_it_reports_the_scores_of_the_scorer(scorer, arguments, data_dir, tmp_path, capsys):
    """A data set that is named twice counts once."""
    output = tmp_path / "new" / "judge.json"
    assert main([*arguments, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == report
    pairs, labels = labeled_pairs(data_dir, "held_out")
    expected = judge_report([verdict.p_yes for verdict in scorer.score(pairs)], labels)
    assert labels == [True, False] * 5 and report["n"] == 10 and "kinds" not in report
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_images_are_opened_late_and_a_damaged_one_is_a_missing_score(
    arguments, data_dir, tmp_path, capsys
):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    image = copy / "images" / "held_out_2_a.png"
    image.write_bytes(image.read_bytes()[:-40])
    labeled_pairs(copy, "held_out")
    assert main([*arguments, "--dataset_dir", str(copy)]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == 1


QUESTION = {"role": "user", "content": "<image><image>Same?"}
YES = {"role": "assistant", "content": "Yes. It is not a No"}
NO = {"role": "assistant", "content": "No. It is not a Yes"}
AGAIN = {"role": "user", "content": "Sure?"}


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"messages": [QUESTION, YES]}, True),
        ({"messages": [QUESTION, NO]}, False),
        ({"messages": [QUESTION, YES, AGAIN, NO]}, None),
        ({"messages": [QUESTION, AGAIN]}, None),
        ({"messages": [{"role": "user", "content": "<img>: <image><image>Same?"}, YES]}, None),
        ({"messages": [{"role": "user", "content": "<image>Same?"}, YES], "images": ["a"]}, None),
    ],
)
def test_a_row_is_a_labeled_pair_or_refused(data_dir, tmp_path, change, label):
    """The label is the word that a pair's only answer begins with."""
    copy = Path(shutil.copytree(data_dir, tmp_path / "copy"))
    rows = json.loads((copy / "pairs.json").read_text())
    (copy / "pairs.json").write_text(json.dumps([rows[0] | change, *rows[1:]]))
    if label is None:
        with pytest.raises(UserError, match="pairs row 0"):
            labeled_pairs(copy, "pairs")
    else:
        _, labels = labeled_pairs(copy, "pairs")
        assert labels[0] == label
