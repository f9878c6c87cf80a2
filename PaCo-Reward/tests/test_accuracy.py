"""``paco-reward accuracy``."""

import json
import shutil

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


def test_images_are_found_as_in_training_or_named_before_the_judge_is_loaded(
    arguments, data_dir, tmp_path, capsys
):
    """Beside their data set's file, or in the folder that media_dir named."""
    for name in ("dataset_info.json", "held_out.json"):
        shutil.copy(data_dir / name, tmp_path)
    arguments[arguments.index("--dataset_dir") + 1] = str(tmp_path)
    (tmp_path / "decompress.sh").touch()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "20 images do not exist" in error and "decompress.sh" in error
    assert main([*arguments, "--media_dir", str(data_dir)]) == 0


def test_a_row_with_a_second_answer_is_no_labeled_pair(tiny, tmp_path):
    """Its questions would be asked as one."""
    file = tiny.save_pairs(tmp_path) / "pairs.json"
    rows = json.loads(file.read_text())
    rows[1]["messages"].append({"role": "assistant", "content": "No. I am not sure."})
    file.write_text(json.dumps(rows))
    with pytest.raises(UserError, match="pairs row 1"):
        labeled_pairs(tmp_path, "pairs")
