"""ConsistencyRank: metrics against loops, resuming, broken items, tables."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageStat

from paco_judge.verdict import Verdict

FOLDER = Path(__file__).parent.parent / "evaluation" / "Consistency_Rank"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import eval_vllm
import print_eval_table
from rank_data import BENCH, BenchError, find_bench
from rank_metrics import METRICS, predicted_order, rank_metrics


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


@pytest.fixture
def bench(tiny, tmp_path):
    """Five items with three candidates each, listed in another order than ranked."""
    root = tmp_path / "data" / BENCH
    ranks, prompts = [], []
    for index in range(5):
        folder = root / "images" / f"{index:04d}"
        folder.mkdir(parents=True)
        names = ["c0.png", "c1.png", "c2.png"]
        for name, seed in zip(["ref.png", *names], (0, 1, 2, 3)):
            tiny.picture(100 * index + seed).save(folder / name)
        ranked = names[index % 3 :] + names[: index % 3]
        ranks.append({"folder": f"{index:04d}", "ref_image": "ref.png", "comp_images": names, "rank_images": ranked})
        criteria = {"style": {"a": "Same colours.", "b": ""}, "identity": {"c": "Same shape.", "d": "Same size?"}}
        prompts.append({"idx": index, "prompt": "p", "criteria": criteria})
    (root / "consistency_full_rank.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranks))
    (root / "prompt_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return root


class BrightnessJudge:
    """An engine whose score is how alike two images' brightness is; counts what it is asked."""

    def __init__(self, fail_after=None):
        self.batches, self.questions, self.fail_after = [], [], fail_after

    def __call__(self, pairs):
        if self.fail_after is not None and len(self.batches) >= self.fail_after:
            raise KeyboardInterrupt
        self.batches.append(len(pairs))
        self.questions += [pair.question for pair in pairs]
        levels = [[ImageStat.Stat(i.convert("L")).mean[0] / 255 for i in (p.image_a, p.image_b)] for p in pairs]
        return [Verdict(1 - abs(a - b)) for a, b in levels]


@pytest.fixture
def judged(monkeypatch, bench, tmp_path):
    """Runs eval_vllm with a brightness judge: judged(judge, "--flag", …) -> exit status."""

    def run(judge, *arguments):
        monkeypatch.setattr(eval_vllm, "make_engine", lambda args: ("brightness", judge))
        base = ["--model", "some/judge", "--dataset_dir", str(bench.parent), "--results_dir", str(tmp_path / "results")]
        return eval_vllm.main([*base, "--batch_size", "4", *arguments])

    return run


def results(tmp_path, template=3):
    text = (tmp_path / "results" / f"judge-v{template}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_results_are_appended_item_by_item(judged, tmp_path):
    judge = BrightnessJudge()
    assert judged(judge) == 0
    rows = results(tmp_path)
    assert [row["folder"] for row in rows] == [f"{i:04d}" for i in range(5)]
    assert judge.batches == [6, 6, 3]  # items of three pairs, gathered to at least four
    for row in rows:
        expected = rank_metrics(row["scores"], [row["comp_images"].index(name) for name in row["rank_images"]])
        assert row["metrics"] == expected and set(METRICS) <= set(expected)
        order = predicted_order(row["scores"])
        assert row["predicted_images"] == [row["comp_images"][i] for i in order]
    again = BrightnessJudge()
    assert judged(again) == 0 and again.batches == [] and results(tmp_path) == rows


def test_a_killed_run_continues(judged, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        judged(BrightnessJudge(fail_after=1))
    file = tmp_path / "results" / "judge-v3.jsonl"
    assert len(results(tmp_path)) == 2
    file.write_bytes(file.read_bytes() + b'{"model": "some/judge", "folder": "00')  # killed while writing
    judge = BrightnessJudge()
    assert judged(judge) == 0 and sum(judge.batches) == 9
    rows = results(tmp_path)
    assert sorted(row["folder"] for row in rows) == [f"{i:04d}" for i in range(5)]


def test_a_broken_item_is_reported_and_the_run_goes_on(judged, bench, tmp_path, capsys):
    (bench / "images" / "0001" / "c1.png").write_bytes(b"no picture")
    ranks = bench / "consistency_full_rank.jsonl"
    lines = ranks.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "rank_images": ["c0.png"]})
    ranks.write_text("\n".join(lines))
    assert judged(BrightnessJudge()) == 1
    said = capsys.readouterr().err
    assert "item 0001: image" in said and "cannot be read" in said
    assert "item 0003: broken row" in said and "2 items have no result: 0003, 0001" in said
    assert [row["folder"] for row in results(tmp_path)] == ["0000", "0002", "0004"]


def test_criteria_are_averaged_within_and_over_dimensions(judged, bench, tmp_path):
    class ByQuestion(BrightnessJudge):
        def __call__(self, pairs):
            self.questions += [pair.question for pair in pairs]
            values = {"colours": 0.8, "shape": 0.2, "size": 0.4}
            return [Verdict(next(v for k, v in values.items() if k in pair.question)) for pair in pairs]

    judge = ByQuestion()
    assert judged(judge, "--prompt_template", "1") == 0
    assert len(judge.questions) == 5 * 3 * 3
    assert results(tmp_path, 1)[0]["scores"] == pytest.approx([(0.8 + 0.3) / 2] * 3)
    assert results(tmp_path, 1)[0]["metrics"]["ties"] == 3

    short, long = BrightnessJudge(), BrightnessJudge()
    assert judged(short, "--prompt_template", "2") == 0 and judged(long) == 0
    assert short.questions[0].endswith('Answer only "Yes" or "No".')
    assert long.questions[0].endswith('Answer "Yes" and "No" first, and then provide detailed reasons.')


def test_another_models_results_are_not_mixed(judged, tmp_path, capsys):
    assert judged(BrightnessJudge()) == 0
    file = tmp_path / "results" / "judge-v3.jsonl"
    file.write_text(file.read_text().replace("some/judge", "other/judge"))
    assert judged(BrightnessJudge()) == 2
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
    assert "choose --engine transformers, or --server URL" in capsys.readouterr().err
    assert eval_vllm.main([*base, "--server", "http://127.0.0.1:9"]) == 2
    assert "no judge answers" in capsys.readouterr().err
    assert eval_vllm.main(["--model", "./none", *base[2:], "--engine", "transformers"]) == 2
    assert "model folder ./none does not exist" in capsys.readouterr().err


def test_tables(judged, tmp_path, capsys):
    assert judged(BrightnessJudge()) == 0
    output = tmp_path / "summary.txt"
    base = ["--results_dir", str(tmp_path / "results"), "--output_file", str(output)]
    assert print_eval_table.main([*base, "--print_std"]) == 0
    text = output.read_text()
    mean = np.mean([row["metrics"]["accuracy"] for row in results(tmp_path)])
    std = np.std([row["metrics"]["accuracy"] for row in results(tmp_path)])
    assert f"{mean:.4f} ± {std:.4f}" in text and text.splitlines()[2].startswith("judge-v3")
    assert print_eval_table.main([*base, "--output_format", "latex"]) == 0
    latex = output.read_text()
    assert latex.startswith(r"\begin{tabular}{lrr") and r"\bottomrule" in latex
    capsys.readouterr()
    assert print_eval_table.main(["--results_dir", str(tmp_path / "none"), *base[2:]]) == 1
    assert "run eval_vllm.py first" in capsys.readouterr().err


def test_the_commands_as_typed(judge_dir, bench, tmp_path):
    """From their own folder, with the transformers engine on a tiny judge."""
    results_dir = tmp_path / "typed"
    command = [sys.executable, "eval_vllm.py", "--model", str(judge_dir), "--dataset_dir", str(bench.parent)]
    command += ["--engine", "transformers", "--batch_size", "8", "--results_dir", str(results_dir)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((results_dir / "judge-v3.jsonl").read_text().splitlines()) == 5
    table = [sys.executable, "print_eval_table.py", "--results_dir", str(results_dir), "--output_format", "txt"]
    done = subprocess.run(
        [*table, "--output_file", str(tmp_path / "s.txt")],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0 and "judge-v3" in done.stdout
