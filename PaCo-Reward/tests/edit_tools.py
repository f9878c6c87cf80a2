"""A small EditReward-Bench, the toy judge loaded once, and the command as users type it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paco_judge.client import Pair
from paco_judge.questions import EDIT_DIMENSIONS, editing_questions

HERE = Path(__file__).parent
FOLDER = HERE.parent / "evaluation" / "Edit-Bench"
TOY_JUDGE = HERE.parent.parent / "quickstart" / "models" / "judge"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import evaluation
from calculate_statistics import GROUPS

from paco_eval.engines import make_engine

TASKS = [task for tasks in GROUPS.values() for task in tasks]
COLUMNS = ("key", "instruction", "input_image", "output_images", "task_type", "dimension")


def share(rows, lenient):
    right = 0
    for row in rows:
        better, worse = row["scores"]
        if better > worse or (lenient and better == worse):
            right += 1
    return right / len(rows)


# ---------------------------------------------------------------- a small data set


@pytest.fixture(scope="session")
def examples(tiny):
    """20 rows with images in memory: 13 task types, each dimension; rows 3n, 3n+1, 3n+2 are about the same edits."""
    rows = []
    for index in range(20):
        seed = 10 * (index // 3)
        rows.append(
            {
                "key": [f"edit{seed}a", f"edit{seed}b"],
                "instruction": f'make the "left" shape {["red", "blue", "green"][seed // 10 % 3]}',
                "input_image": tiny.picture(seed),
                "output_images": [tiny.picture(seed + 1), tiny.picture(seed + 2)],
                "task_type": TASKS[index % 13],
                "dimension": EDIT_DIMENSIONS[index % 3],
            }
        )
    return rows


def save_jsonl(rows, folder: Path) -> Path:
    """The rows as JSON lines, their images as files beside them."""
    (folder / "images").mkdir(parents=True)
    lines = []
    for index, row in enumerate(rows):
        files = [f"images/{index}_{name}.png" for name in ("in", "a", "b")]
        for file, image in zip(files, [row["input_image"], *row["output_images"]]):
            image.save(folder / file)
        lines.append(json.dumps({**row, "input_image": files[0], "output_images": files[1:]}, ensure_ascii=False))
    file = folder / "bench.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def hugging_face(rows):
    """The rows as a Hugging Face data set with its image columns."""
    import datasets

    features = datasets.Features(
        {
            "key": datasets.Sequence(datasets.Value("string")),
            "instruction": datasets.Value("string"),
            "input_image": datasets.Image(),
            "output_images": datasets.Sequence(datasets.Image()),
            "task_type": datasets.Value("string"),
            "dimension": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


@pytest.fixture
def data(examples, tmp_path):
    """The data set as JSON lines."""
    return save_jsonl(examples, tmp_path / "data")


@pytest.fixture(scope="session")
def answering_judge(tmp_path_factory, tiny):
    """The quickstart's base judge as a folder, made to answer Yes or No: its P(Yes), above all other tokens.

    Untrained it says something else, and a pair without Yes and No among the top 20 tokens has no score. A multiple of
    the mean last hidden state is added to both rows of the head: the difference of the two logits stays what it was.
    """
    import torch

    from paco_reward.scorer import JudgeScorer

    judge = JudgeScorer.from_pretrained(TOY_JUDGE)
    states = []
    hook = judge.model.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][:, -1]))
    judge.score([Pair(tiny.picture(i), tiny.picture(i + 1), editing_questions("make it red")[i % 2]) for i in range(8)])
    hook.remove()
    states = torch.cat(states)
    towards = states.mean(0)
    head = torch.nn.Parameter(judge.model.lm_head.weight.detach().clone())
    head.data[[judge.yes_id, judge.no_id]] += towards * 40 / (states @ towards).min()
    judge.model.lm_head.weight = head
    judge.model.config.tie_word_embeddings = judge.model.config.get_text_config().tie_word_embeddings = False
    folder = tmp_path_factory.mktemp("answering") / "judge"
    judge.model.save_pretrained(folder)
    judge.processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_judge(answering_judge):
    """That judge, loaded by the transformers engine."""
    args = evaluation.parse(["--model", str(answering_judge), "--engine", "transformers", "--batch_size", "16"])
    return make_engine(args)[1]


@pytest.fixture
def judged(monkeypatch, toy_judge, answering_judge, data, tmp_path):
    """Runs evaluation.py with the loaded toy judge: judged("--flag", …, stop_after=batches) -> exit status."""
    asked = []

    def run(*arguments, stop_after=None):
        def engine(pairs):
            if stop_after is not None and len(asked) - before >= stop_after:
                raise KeyboardInterrupt
            asked.append(len(pairs))
            return toy_judge(pairs)

        before = len(asked)
        monkeypatch.setattr(evaluation, "make_engine", lambda args: ("transformers", engine))
        base = ["--model", str(answering_judge), "--dataset", str(data), "--results_dir", str(tmp_path / "results")]
        return evaluation.main([*base, "--output", str(tmp_path / "summary"), "--batch_size", "4", *arguments])

    run.asked = asked
    return run


def results(tmp_path):
    text = (tmp_path / "results" / "judge.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def typed(*arguments, **more):
    """The command as users type it, started in its folder; `PYTHON` is this interpreter."""
    return subprocess.Popen(
        ["bash", "evaluate_vllm_PaCoReward.sh", *map(str, arguments)],
        cwd=FOLDER,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def edit_lines(data, changes):
    """Change rows of the JSON lines: {index: function of the row, or text of the line}."""
    lines = data.read_text(encoding="utf-8").splitlines()
    for index, change in changes.items():
        lines[index] = change if isinstance(change, str) else json.dumps(change(json.loads(lines[index])))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def fake_judge():
    """The judge package's server of a few lines."""
    import importlib.util

    file = HERE.parent / "judge" / "tests" / "fake_judge.py"
    spec = importlib.util.spec_from_file_location("edit_bench_fake_judge", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
