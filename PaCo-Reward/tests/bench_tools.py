"""Small benchmarks, a judge that compares brightness, and the commands as users type them."""

import json
from pathlib import Path

import pytest
from PIL import ImageStat
from tiny_judge import picture, save_answering

from paco_eval import benchmark, edit
from paco_eval import rank as rank_bench
from paco_eval.edit_tables import GROUPS
from paco_judge.questions import EDIT_DIMENSIONS
from paco_judge.verdict import Verdict

HERE = Path(__file__).parent
EVALUATION = HERE.parent / "evaluation"
RANK_FOLDER = EVALUATION / "Consistency_Rank"
TOY_JUDGE = HERE.parent.parent / "quickstart" / "models" / "judge"
TASKS = [task for tasks in GROUPS.values() for task in tasks]


def brightness(image):
    return ImageStat.Stat(image.convert("L")).mean[0] / 255


class BrightnessJudge:
    """An engine that scores how similar the brightness of two images is.

    For the question about the instruction, the score is squared.
    """

    def __init__(self, stop_after=None):
        self.batches = []
        self.questions = []
        self.stop_after = stop_after

    def __call__(self, pairs):
        if len(self.batches) == self.stop_after:
            raise KeyboardInterrupt
        self.batches.append(len(pairs))
        self.questions += [pair.question for pair in pairs]
        return [Verdict(self.score(pair)) for pair in pairs]

    def score(self, pair):
        a, b = map(brightness, pair.images)
        return (1 - abs(a - b)) ** (2 if "follow the instruction" in pair.question else 1)


class BenchCommand:
    """A benchmark in this process: ``command(judge, "--flag", …)`` -> exit status."""

    def __init__(self, script, data, out, arguments, results="judge-v3"):
        self.script = script
        self.data = data
        self.out = out
        self.arguments = arguments
        self.file = out / "results" / f"{results}.jsonl"

    def __call__(self, judge, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, "make_engine", lambda args: judge)
            return self.main("--model", "some/judge", "--batch_size", "4", *arguments)

    def main(self, *arguments):
        return self.script.main([str(argument) for argument in (*self.arguments, *arguments)])

    @property
    def rows(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def save_rank_bench(root, items):
    """A ConsistencyRank-Bench: three candidates for each item, not listed as they are ranked."""
    ranks = []
    prompts = []
    for index in range(items):
        folder = root / "images" / f"{index:04d}"
        folder.mkdir(parents=True)
        names = ["c0.png", "c1.png", "c2.png"]
        for seed, name in enumerate(["ref.png", *names]):
            picture(100 * index + seed).save(folder / name)
        ranked = names[index % 3 :] + names[: index % 3]
        ranks.append(
            {
                "folder": f"{index:04d}",
                "ref_image": "ref.png",
                "comp_images": names,
                "rank_images": ranked,
            }
        )
        criteria = {
            "style": {"a": "Same colours.", "b": ""},
            "identity": {"c": "Same shape.", "d": "Same size?"},
        }
        prompts.append({"idx": index, "prompt": "p", "criteria": criteria})
    (root / "consistency_full_rank.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ranks)
    )
    (root / "prompt_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


@pytest.fixture
def bench(tmp_path):
    """A ConsistencyRank-Bench of five items."""
    root = tmp_path / "data" / "ConsistencyRank-Bench"
    save_rank_bench(root, 5)
    return root


@pytest.fixture
def rank(bench, tmp_path):
    """``eval_vllm.py`` on ``bench``."""
    arguments = ["--dataset_dir", bench.parent, "--results_dir", tmp_path / "results"]
    return BenchCommand(rank_bench, bench, tmp_path, arguments)


def edit_examples(count):
    """Rows of EditReward-Bench; rows 3n, 3n+1, 3n+2 have the same edits."""
    rows = []
    for index in range(count):
        seed = 10 * (index // 3)
        rows.append(
            {
                "key": [f"edit{seed}a", f"edit{seed}b"],
                "instruction": f'make the "left" shape {seed} px larger',
            }
        )
        rows[-1] |= {
            "input_image": picture(seed),
            "output_images": [picture(seed + i) for i in (1, 2)],
        }
        rows[-1] |= {"task_type": TASKS[index % 13], "dimension": EDIT_DIMENSIONS[index % 3]}
    return rows


def save_edit_bench(file, examples):
    """``examples`` as JSON lines, with their images as files in the same folder."""
    lines = []
    (file.parent / "images").mkdir(parents=True)
    for index, row in enumerate(examples):
        files = [f"images/{index}_{name}.png" for name in ("in", "a", "b")]
        for name, image in zip(files, [row["input_image"], *row["output_images"]]):
            image.save(file.parent / name)
        lines.append(json.dumps({**row, "input_image": files[0], "output_images": files[1:]}))
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def examples():
    return edit_examples(20)


def edit_lines(file, changes):
    """Change lines of a JSON lines file: {index: function of the row, or text of the line}."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for index, change in changes.items():
        lines[index] = (
            change if isinstance(change, str) else json.dumps(change(json.loads(lines[index])))
        )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def edits(examples, tmp_path):
    """Edit-Bench's ``evaluation.py`` on ``examples``."""
    data = tmp_path / "data" / "bench.jsonl"
    save_edit_bench(data, examples)
    arguments = [
        "--dataset",
        data,
        "--results_dir",
        tmp_path / "results",
        "--output",
        tmp_path / "summary",
    ]
    return BenchCommand(edit, data, tmp_path, arguments, "judge")


@pytest.fixture(scope="session")
def answering_judge(tmp_path_factory):
    """The quickstart's base judge, made to answer."""
    return save_answering(TOY_JUDGE, tmp_path_factory.mktemp("answering") / "judge")
