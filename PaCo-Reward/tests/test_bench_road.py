"""Each benchmark from its files to its table through a server.

Items, images, sizes, texts, labels and answers all differ. What is expected comes from the files.
"""

import numpy as np
import pytest
from bench_tools import edit_lines
from fakes import fake_judge
from pairing_tools import digest, p_yes_of, read_lines, write_lines
from PIL import Image

from paco_eval import edit
from paco_eval.rank import table_main
from paco_judge.questions import shipped


@pytest.fixture
def server():
    """(options, ``p_yes(question, image files, …)`` as the judge answers)."""

    def respond(number, asked):
        images, question = fake_judge.request_content(asked)
        return 200, fake_judge.answer(p_yes_of(*map(digest, images), question)), {}

    def p_yes(question, *files):
        return p_yes_of(*(digest(Image.open(file)) for file in files), question)

    with fake_judge.FakeJudge(respond, models=["judge"]) as judge:
        yield ["--server", judge.url], p_yes  # which has one model


QUESTIONS = {"prompt_following": "editing_instruction", "consistency": "editing_consistency"}


def test_rank(server, rank, tmp_path):
    options, p_yes = server
    question = tmp_path / "mine.txt"
    question.write_text("{theme} Is it so: {criterion}")
    assert rank.main(*options, "--question", question) == 0
    rows = read_lines(tmp_path / "results" / "judge-vmine.jsonl")
    assert rows[0]["model"] == "judge"
    prompts = {row["idx"]: row for row in read_lines(rank.data / "prompt_data.jsonl")}
    all_scores = []
    for row, item in zip(rows, read_lines(rank.data / "consistency_full_rank.jsonl"), strict=True):
        assert {name: row[name] for name in item} == item
        prompt = prompts[int(item["folder"])]
        folder = rank.data / "images" / item["folder"]
        scores = {}
        for name in item["comp_images"]:
            of_dimensions = []
            for criteria in prompt["criteria"].values():
                answers = []
                for text in filter(None, criteria.values()):
                    question = f"{prompt['theme']} Is it so: {text}"
                    answers.append(p_yes(question, folder / item["ref_image"], folder / name))
                of_dimensions.append(np.mean(answers))
            scores[name] = np.mean(of_dimensions)
        all_scores += scores.values()
        assert row["scores"] == pytest.approx(list(scores.values()))
        order = sorted(scores, key=scores.get, reverse=True)
        assert row["predicted_images"] == order
        hits = np.equal(order, item["rank_images"])
        assert row["metrics"]["accuracy"] == pytest.approx(hits.mean())
    assert min(np.diff(sorted(all_scores))) > 1e-4
    rows[0]["metrics"]["ties"] = 1.0
    rows[2]["metrics"]["ties"] = 3.0
    write_lines(tmp_path / "results" / "other.jsonl", rows[:3])
    table = tmp_path / "table.txt"
    command = ["--results_dir", str(tmp_path / "results"), "--output_file", str(table)]
    assert table_main([*command, "--print_std"]) == 0
    lines = {line.split()[0]: line for line in table.read_text().splitlines()}
    for model, of_model in (("judge-vmine", rows), ("other", rows[:3])):
        for name in ("accuracy", "kendalltau", "spearmanr", "footrule"):
            values = [row["metrics"][name] for row in of_model]
            assert f"{np.mean(values):.4f} ± {np.std(values):.4f}" in lines[model]
    assert lines["other"].split()[1:2] + lines["other"].split()[-1:] == ["3", "4"]  # items, ties


def test_edits(server, edits, tmp_path, capsys):
    options, p_yes = server
    assert edits.main(*options, "--batch_size", "5") == 0
    for row, item in zip(edits.rows, read_lines(edits.data), strict=True):
        assert [row["key"], row["dimension"]] == [item["key"], item["dimension"]]
        scores = []
        for file, answers in zip(item["output_images"], row["answers"], strict=True):
            files = [edits.data.parent / name for name in (item["input_image"], file)]
            expected = {}
            for about_what, name in QUESTIONS.items():
                if item["dimension"] in (about_what, "overall"):
                    instruction = item["instruction"].strip()
                    text = shipped()[name].replace("{instruction}", instruction)
                    expected[about_what] = p_yes(text, *files)
            assert answers == pytest.approx(expected)
            scores.append(np.prod(list(expected.values())) ** (1 / len(expected)))
        assert row["scores"] == pytest.approx(scores)
    text = (tmp_path / "summary.txt").read_text()
    assert text in capsys.readouterr().out
    edits.file.with_name("other.jsonl").write_text(edits.file.read_text())
    command = ["--result_dir", str(edits.file.parent), "--output", str(tmp_path / "v1.5")]
    assert edit.tables_main([*command, "--backbone", "some/judge"]) == 0
    assert (tmp_path / "v1.5.txt").read_text() == text
    assert r"prompt\_following & lenient" in (tmp_path / "v1.5.tex").read_text()


@pytest.mark.parametrize("compares", [False, True])
def test_choices(server, choices, tmp_path, compares):
    """The winners are 0 and 1, or 1 and 2."""
    options, p_yes = server
    first_winner = int(compares)
    rows = read_lines(choices.data)
    changes = {i: {"winner": str(int(row["winner"]) + first_winner)} for i, row in enumerate(rows)}
    edit_lines(choices.data, changes)
    question = tmp_path / "mine.txt"
    question.write_text("Edit: {instruction}. Is the first edit better?")
    template = shipped()["editing_consistency"]
    if compares:
        template = question.read_text()
        options = [*options, "--compare", question]
    assert choices.main(*options) == 0
    (file,) = (tmp_path / "results").glob("*.jsonl")
    right = {}
    for row, item in zip(read_lines(file), read_lines(choices.data), strict=True):
        names = [item["source_image"], *item["edited_images"]]
        before, first, second = (tmp_path / name for name in names)
        text = template.replace("{instruction}", item["instruction"])
        shown = [(before, first), (before, second)]
        if compares:
            shown = [(before, first, second), (before, second, first)]
        scores = [p_yes(text, *files) for files in shown]
        assert row["scores"] == pytest.approx(scores) and row["key"] == item["key"]
        right.setdefault(item["task"], []).append(
            np.argmax(scores) == int(item["winner"]) - first_winner
        )
    right["average"] = np.concatenate([*right.values()])
    head, line = (tmp_path / "table.txt").read_text().splitlines()
    cells = dict(zip(head.split(), line.split(), strict=True))
    for name, hits in right.items():
        assert cells[name] == f"{np.mean(hits):.4f}"
