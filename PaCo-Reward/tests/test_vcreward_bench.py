"""VCReward-Bench: winners and broken rows. Scores and table: test_bench_road.py."""

from bench_tools import EVALUATION, ContentJudge, edit_lines

from paco_eval import vc as vc_reward
from paco_judge.verdict import Verdict


def test_ties_are_wrong_and_rows_without_a_winner_are_counted(choices, capsys, monkeypatch):
    edit_lines(choices.data, {1: {"winner": "left"}})
    assert choices(lambda pairs: [Verdict(0.5)] * len(pairs)) == 1
    output = capsys.readouterr()
    assert "item 1 k1: " in output.err
    *_, average, ties = output.out.split()
    assert (average, ties) == ("0.0000", "7")
    choices.data.write_text("")
    assert choices(ContentJudge()) == 1
    monkeypatch.chdir(EVALUATION / "VCReward-Bench")  # our code's folder is not the data set
    assert choices.main("--dataset", "") == 1
    assert vc_reward.HUB_NAME in capsys.readouterr().err


def test_winners():
    assert [vc_reward.winner_index(value, False) for value in (0, "1", "A", "b")] == [0, 1, 0, 1]
    assert [vc_reward.winner_index(value, True) for value in (1, "2")] == [0, 1]
