"""``paco-reward accuracy``."""

import json
import shutil

import pytest

from paco_judge.errors import UserError
from paco_judge.questions import RequestForm
from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs
from paco_reward.metrics import judge_report


def test_it_reports_the_scores_of_the_scorer(
    answering_judge, adapter_dir, data_dir, tmp_path, capsys
):
    """Of a judge with its adapter and form. A data set that is named twice counts once."""
    output = tmp_path / "new" / "judge.json"
    options = {"--model": answering_judge, "--adapter": adapter_dir, "--answer_tokens": "variants"}
    options |= {"--dataset_dir": data_dir, "--dataset": "held_out,pairs,held_out"}
    words = [str(word) for option in options.items() for word in option]
    assert main(["accuracy", *words, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == report
    form = RequestForm(answer_tokens="variants")
    scorer = JudgeScorer.from_pretrained(answering_judge, adapter_dir, form=form)
    all_scores = []
    all_labels = []
    for name, count in (("held_out", 10), ("pairs", 16)):
        pairs, labels = labeled_pairs(data_dir, name)
        assert labels == [True, False] * (count // 2)
        scores = [verdict.p_yes for verdict in scorer.score(pairs)]
        expected = judge_report(scores, labels)
        assert report["kinds"][name] == pytest.approx(expected, abs=1e-5)
        all_scores += scores
        all_labels += labels
    expected = judge_report(all_scores, all_labels)
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_pair_without_a_score_anywhere_is_missing(judge_dir, data_dir, capsys):
    """Yes and No of the random judge are not among its most probable tokens."""
    words = ["--model", judge_dir, "--dataset_dir", data_dir, "--dataset", "held_out"]
    assert main(["accuracy", *map(str, words)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["missing"], report["n"], report["accuracy"]) == (10, 0, None)


def test_images_are_found_as_in_training_or_named_before_the_judge_is_loaded(
    answering_judge, data_dir, tmp_path, capsys
):
    """Beside their data set's file, or in the folder that media_dir named."""
    for name in ("dataset_info.json", "held_out.json"):
        shutil.copy(data_dir / name, tmp_path)
    arguments = ["accuracy", "--model", str(answering_judge), "--dataset", "held_out"]
    arguments += ["--dataset_dir", str(tmp_path)]
    (tmp_path / "decompress.sh").touch()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "20 images do not exist" in error and "decompress.sh" in error
    assert main([*arguments, "--media_dir", str(data_dir)]) == 0


def test_a_row_with_a_second_answer_is_no_labeled_pair(tiny, tmp_path):
    """Its questions would be asked as one."""
    file = tiny.save_pairs(tmp_path) / "pairs.json"
    rows = json.loads(file.read_text())
    for role, content in (("user", "Really?"), ("assistant", "No. I am not sure.")):
        rows[1]["messages"].append({"role": role, "content": content})
    file.write_text(json.dumps(rows))
    with pytest.raises(UserError, match="pairs row 1"):
        labeled_pairs(tmp_path, "pairs")
