"""ConsistencyRank: metrics against loops, resuming, broken items, tables."""

import json
import re
import signal
import sys
import time
from itertools import combinations

import eval_vllm
import numpy as np
import print_eval_table
import pytest
from hypothesis import given
from hypothesis import strategies as st
from consistency_rank import METRICS, find_bench, predicted_order, rank_metrics
from rank_tools import BrightnessJudge, outcome, results, typed

from paco_eval.errors import BenchError
from paco_eval.results import as_latex
from paco_judge.verdict import Verdict


def tau_b(first, second):
    """Kendall's tau-b by counting pairs."""
    concordant = discordant = tied_first = tied_second = 0
    for i, j in combinations(range(len(first)), 2):
        a, b = np.sign(first[i] - first[j]), np.sign(second[i] - second[j])
        concordant += a * b > 0
        discordant += a * b < 0
        tied_first += a == 0
        tied_second += b == 0
    pairs = len(first) * (len(first) - 1) / 2
    return (concordant - discordant) / np.sqrt((pairs - tied_first) * (pairs - tied_second))


def average_ranks(values):
    return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]


def rho(first, second):
    return np.corrcoef(average_ranks(first), average_ranks(second))[0, 1]


scores_and_order = st.integers(2, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 0.99, 1.0]), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@given(scores_and_order)
def test_metrics_of_random_rankings(case):
    scores, order = case
    n = len(scores)
    found = rank_metrics(scores, order)
    rank_of = {candidate: position for position, candidate in enumerate(order)}
    predicted = sorted(range(n), key=lambda i: -scores[i])  # sorted() is stable: ties in listed order
    assert predicted_order(scores) == predicted
    assert found["accuracy"] == pytest.approx(sum(predicted[k] == order[k] for k in range(n)) / n)
    assert found["footrule"] == sum(abs(predicted.index(c) - rank_of[c]) for c in range(n))
    assert found["top1"] == (predicted[0] == order[0]) and found["bottom1"] == (predicted[-1] == order[-1])
    assert found["top_bottom_mean"] == (found["top1"] + found["bottom1"]) / 2
    assert found["ties"] == sum(a == b for a, b in combinations(scores, 2))
    if len(set(scores)) == 1:
        assert found["kendalltau"] == found["spearmanr"] == 0
    else:
        goodness = [-rank_of[c] for c in range(n)]
        assert found["kendalltau"] == pytest.approx(tau_b(scores, goodness), abs=1e-9)
        assert found["spearmanr"] == pytest.approx(rho(scores, goodness), abs=1e-9)
    assert found["kendalltau_published"] == pytest.approx(tau_b(predicted, order), abs=1e-9)
    assert found["spearmanr_published"] == pytest.approx(rho(predicted, order), abs=1e-9)


def test_perfect_and_reversed():
    assert rank_metrics([0.9, 0.5, 0.1], [0, 1, 2])["kendalltau"] == 1
    reverse = rank_metrics([0.9, 0.5, 0.1], [2, 1, 0])
    assert reverse["kendalltau"] == -1 and reverse["footrule"] == 4 and reverse["accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="at least two"):
        rank_metrics([0.5], [0])
    with pytest.raises(ValueError, match="no permutation"):
        rank_metrics([0.5, 0.1], [0, 0])


def test_results_are_appended_item_by_item(ranked, tmp_path):
    judge = BrightnessJudge()
    assert ranked(judge) == 0
    rows = results(tmp_path)
    assert [row["folder"] for row in rows] == [f"{i:04d}" for i in range(5)]
    assert judge.batches == [6, 6, 3]  # items of three pairs, gathered to at least four
    for row in rows:
        expected = rank_metrics(row["scores"], [row["comp_images"].index(name) for name in row["rank_images"]])
        assert row["metrics"] == expected and set(METRICS) <= set(expected)
        order = predicted_order(row["scores"])
        assert row["predicted_images"] == [row["comp_images"][i] for i in order]
    again = BrightnessJudge()
    assert ranked(again) == 0 and again.batches == [] and results(tmp_path) == rows


def test_a_stopped_run_continues(ranked, tmp_path, capsys):
    assert ranked(BrightnessJudge(fail_after=1)) == 130
    assert "the same command continues" in capsys.readouterr().err
    file = tmp_path / "results" / "judge-v3.jsonl"
    assert len(results(tmp_path)) == 2
    file.write_bytes(file.read_bytes() + b'{"model": "some/judge", "folder": "00')  # killed while writing
    judge = BrightnessJudge()
    assert ranked(judge) == 0 and sum(judge.batches) == 9
    rows = results(tmp_path)
    assert sorted(row["folder"] for row in rows) == [f"{i:04d}" for i in range(5)]


def test_a_broken_item_is_reported_and_the_run_goes_on(ranked, bench, tmp_path, capsys):
    (bench / "images" / "0001" / "c1.png").write_bytes(b"no picture")
    ranks = bench / "consistency_full_rank.jsonl"
    lines = ranks.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "rank_images": ["c0.png"]})
    ranks.write_text("\n".join(lines))
    assert ranked(BrightnessJudge()) == 1
    said = capsys.readouterr().err
    assert "item 0001: image" in said and "cannot be read" in said
    assert "item 0003: broken row" in said and "2 items have no result: 0003, 0001" in said
    assert [row["folder"] for row in results(tmp_path)] == ["0000", "0002", "0004"]


def test_criteria_are_averaged_within_and_over_dimensions(ranked, bench, tmp_path):
    class ByQuestion(BrightnessJudge):
        def __call__(self, pairs):
            self.questions += [pair.question for pair in pairs]
            values = {"colours": 0.8, "shape": 0.2, "size": 0.4}
            return [Verdict(next(v for k, v in values.items() if k in pair.question)) for pair in pairs]

    judge = ByQuestion()
    assert ranked(judge, "--prompt_template", "1") == 0
    assert len(judge.questions) == 5 * 3 * 3
    assert results(tmp_path, 1)[0]["scores"] == pytest.approx([(0.8 + 0.3) / 2] * 3)
    assert results(tmp_path, 1)[0]["metrics"]["ties"] == 3

    short, long = BrightnessJudge(), BrightnessJudge()
    assert ranked(short, "--prompt_template", "2") == 0 and ranked(long) == 0
    assert short.questions[0].endswith('Answer only "Yes" or "No".')
    assert long.questions[0].endswith('Answer "Yes" and "No" first, and then provide detailed reasons.')


def test_another_models_results_are_not_mixed(ranked, tmp_path, capsys):
    assert ranked(BrightnessJudge()) == 0
    file = tmp_path / "results" / "judge-v3.jsonl"
    file.write_text(file.read_text().replace("some/judge", "other/judge"))
    assert ranked(BrightnessJudge()) == 2
    assert "is of model other/judge; move the file away" in capsys.readouterr().err


def test_finding_the_benchmark(bench, monkeypatch, tmp_path):
    assert find_bench(str(bench)) == bench == find_bench(str(bench.parent))
    inner = bench.parent / "evaluation" / "Consistency_Rank"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert find_bench(None).resolve() == bench.resolve()
    with pytest.raises(BenchError, match="download it with"):
        find_bench(str(tmp_path / "nowhere"))


def test_engines_that_cannot_be_had(bench, monkeypatch, tmp_path, capsys):
    base = ["--model", "some/judge", "--dataset_dir", str(bench), "--results_dir", str(tmp_path / "r")]
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert eval_vllm.main(base) == 2
    said = capsys.readouterr().err
    assert sys.executable in said and ".venv-vllm/bin/python" in said and "`pip install vllm` here" in said
    assert "choose --engine transformers, or --server URL" in said
    assert eval_vllm.main([*base, "--server", "http://127.0.0.1:9"]) == 2
    assert "no judge answers" in capsys.readouterr().err
    assert eval_vllm.main(["--model", "./none", *base[2:], "--engine", "transformers"]) == 2
    assert "model folder ./none does not exist" in capsys.readouterr().err


def test_tables(ranked, tmp_path, capsys):
    assert ranked(BrightnessJudge()) == 0
    output = tmp_path / "summary.txt"
    base = ["--results_dir", str(tmp_path / "results"), "--output_file", str(output)]
    assert print_eval_table.main([*base, "--print_std"]) == 0
    text = output.read_text()
    mean = np.mean([row["metrics"]["accuracy"] for row in results(tmp_path)])
    std = np.std([row["metrics"]["accuracy"] for row in results(tmp_path)])
    assert f"{mean:.4f} ± {std:.4f}" in text and text.splitlines()[2].startswith("judge-v3")
    assert print_eval_table.main([*base, "--output_format", "latex", "--print_std"]) == 0
    latex = output.read_text()
    assert rf"{mean:.4f} $\pm$ {std:.4f}" in latex and len(tabular(latex)) == 2
    assert print_eval_table.main([*base, "--output_format", "latex"]) == 0
    assert "pm" not in output.read_text() and len(tabular(output.read_text())) == 2
    capsys.readouterr()
    (tmp_path / "results" / "other.jsonl").write_text('{"a": 1}\n')
    assert print_eval_table.main(base) == 1
    assert "other.jsonl line 1 is no result of eval_vllm.py or eval.py" in capsys.readouterr().err
    assert print_eval_table.main(["--results_dir", str(tmp_path / "none"), *base[2:]]) == 1
    assert "run eval_vllm.py first" in capsys.readouterr().err


def tabular(latex):
    """The rows of a tabular that TeX would take: balanced, special signs escaped, as many cells as columns."""
    head, *body = latex.splitlines()
    columns = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", head)[1]
    assert body[0] == r"\toprule" and body[2] == r"\midrule" and body[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = []
    for line in [body[1], *body[3:-2]]:
        assert line.endswith(r" \\")
        line = line.removesuffix(r" \\")
        words = r"\\text(?:backslash|asciitilde|asciicircum|less|greater|bar)\{\}|\$\\pm\$"
        plain = re.sub(rf"{words}|\\[_%&#${{}}]|\{{[*\[]\}}", "x", line)
        assert not re.search(r"[\\_%#${}~^<>|]", plain), line
        rows.append(plain.split("&"))
        assert len(rows[-1]) == len(columns)
    return rows


@given(st.lists(st.text(st.sampled_from("aB1 _%&#${}~^\\<>|±[]*"), max_size=12), min_size=3, max_size=3))
def test_latex_of_any_name_compiles(names):
    table = [["model", "a", "b"], *([name, "1.0", "0.5 ± 0.1"] for name in names)]
    rows = tabular(as_latex(table))
    assert len(rows) == 4
    for name, row in zip(names, rows[1:]):
        assert len(row[0].rstrip()) <= len(name) + 1


def typed_arguments(model, bench, results_dir):
    base = ["--model", model, "--dataset_dir", bench.parent, "--results_dir", results_dir]
    return [*base, "--engine", "transformers", "--batch_size", "1"]


@pytest.mark.slow
def test_the_commands_as_typed_and_killed(answering_judge, bench, tmp_path):
    """SIGKILL between items, the same command again: every item once, what was written stays; then the table."""
    arguments = typed_arguments(answering_judge, bench, tmp_path / "typed")
    file = tmp_path / "typed" / "judge-v3.jsonl"
    first = typed("eval_vllm.py", *arguments)
    deadline = time.monotonic() + 280
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0][-2000:]
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    assert outcome(first)[0] == -signal.SIGKILL
    kept = file.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert kept.count(b"\n") < 5
    status, output = outcome(typed("eval_vllm.py", *arguments))
    assert status == 0 and "5/5 items" in output, output[-2000:]
    assert file.read_bytes().startswith(kept)
    assert [json.loads(line)["folder"] for line in file.read_text().splitlines()] == [f"{i:04d}" for i in range(5)]
    table = ["--results_dir", tmp_path / "typed", "--output_file", tmp_path / "s.txt", "--output_format", "txt"]
    status, output = outcome(typed("print_eval_table.py", *table))
    assert status == 0 and "judge-v3" in output and (tmp_path / "s.txt").read_text() == output
