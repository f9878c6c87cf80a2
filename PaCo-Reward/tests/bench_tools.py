"""Small benchmarks in which everything differs, and judges that answer from what they are asked."""

from pathlib import Path

import pytest
from pairing_tools import digest, p_yes_of, read_lines, write_lines
from tiny_judge import TOY_JUDGE, picture, save_answering

from paco_eval import benchmark, edit, rank, vc
from paco_eval.edit import GROUPS
from paco_judge.questions import EDIT_DIMENSIONS
from paco_judge.verdict import Verdict

HERE = Path(__file__).parent
EVALUATION = HERE.parent / "evaluation"
RANK_FOLDER = EVALUATION / "Consistency_Rank"
TASKS = [task for tasks in GROUPS.values() for task in tasks]


class ContentJudge:
    """An engine that answers ``p_yes_of``; ``stop_after`` batches Ctrl-C comes."""

    def __init__(self, stop_after=None):
        self.questions = []
        self.batches_left = stop_after

    def __call__(self, pairs):
        if self.batches_left == 0:
            raise KeyboardInterrupt
        if self.batches_left:
            self.batches_left -= 1
        self.questions += [pair.question for pair in pairs]
        return [self.answer(pair) for pair in pairs]

    def answer(self, pair):
        return Verdict(p_yes_of(*map(digest, pair.images), pair.question))


class BenchCommand:
    """A benchmark in this process: ``command(judge, "--flag", …)`` -> exit status."""

    def __init__(self, script, data, out, arguments, results="judge"):
        self.script = script
        self.data = data
        self.out = out
        self.arguments = [*arguments, "--results_dir", out / "results"]
        self.file = out / "results" / f"{results}.jsonl"
        self.judge = out / "some" / "judge"
        self.judge.mkdir(parents=True)
        (self.judge / "config.json").write_text("{}")

    def __call__(self, judge, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, "make_engine", lambda args: judge)
            return self.main("--model", self.judge, "--batch_size", "4", *arguments)

    def main(self, *arguments):
        return self.script.main([*map(str, (*self.arguments, *arguments))])

    @property
    def rows(self):
        return read_lines(self.file)


def edit_lines(file, changes):
    """Change lines of a JSON lines file: {index: new row}. A new row keeps what it does not have."""
    rows = read_lines(file)
    for index, new in changes.items():
        rows[index] |= new
    write_lines(file, rows)


def save_picture(folder, name, seed):
    """A picture of its own size. Returns its name."""
    picture(seed, 28 + seed % 29).save(folder / name)
    return name


# Candidates of each item of ``save_rank_bench`` as they are listed, and as they are ranked.
RANKINGS = [("abc", "bca"), ("ab", "ba"), ("abcd", "dbac"), ("abc", "cab"), ("ab", "ab")]


def save_rank_bench(root, items=5):
    """A ConsistencyRank-Bench of up to five items; its prompts stand in another order."""
    rankings = []
    prompts = []
    for index, (listed, ranked) in enumerate(RANKINGS[:items]):
        number = 7 * index + 5
        folder = root / "images" / f"{number:04d}"
        folder.mkdir(parents=True)
        for place, letter in enumerate(f"r{listed}"):
            save_picture(folder, f"{letter}{index}.png", 100 * index + place)
        rankings.append(
            {
                "folder": folder.name,
                "ref_image": f"r{index}.png",
                "comp_images": [f"{letter}{index}.png" for letter in listed],
                "rank_images": [f"{letter}{index}.png" for letter in ranked],
            }
        )
        criteria = {"style": {"a": f"Same color {index}.", "b": ""}}
        criteria["identity"] = {str(i): f"Same shape {index}{i}?" for i in range(index % 3 + 1)}
        theme = f"A 1x2 grid layout of {number} cats."
        prompt = f"{theme} [LEFT]: a. [RIGHT]: b."
        prompts.append({"idx": number, "prompt": prompt, "theme": theme, "criteria": criteria})
    write_lines(root / "consistency_full_rank.jsonl", rankings)
    write_lines(root / "prompt_data.jsonl", prompts[::-1])


@pytest.fixture
def bench(tmp_path):
    """A ConsistencyRank-Bench of five items."""
    root = tmp_path / "data" / "ConsistencyRank-Bench"
    save_rank_bench(root)
    return root


@pytest.fixture(name="rank")
def rank_command(bench, tmp_path):
    """``eval_vllm.py`` on ``bench``."""
    return BenchCommand(rank, bench, tmp_path, ["--dataset_dir", bench.parent], "judge-v3")


def edit_examples(count=20):
    """Rows of EditReward-Bench; rows 3n, 3n+1, 3n+2 have the same edits."""
    rows = []
    for index in range(count):
        seed = 10 * (index // 3)
        before, better, worse = (picture(seed + i, 30 + seed % 7 + i) for i in range(3))
        rows.append(
            {
                "key": [f"edit{index}a", f"edit{index}b"],
                "instruction": f' make the "left" shape {seed} px larger\n',
                "input_image": before,
                "output_images": [better, worse],
                "task_type": TASKS[index % 13],
                "dimension": EDIT_DIMENSIONS[index % 3],
            }
        )
    return rows


@pytest.fixture(scope="session")
def examples():
    return edit_examples()


def save_edit_bench(file, examples):
    """``examples`` as JSON lines, with their images as files in the same folder."""
    (file.parent / "images").mkdir(parents=True)
    rows = []
    for index, row in enumerate(examples):
        files = [f"images/{index}_{name}.png" for name in ("in", "a", "b")]
        for name, image in zip(files, [row["input_image"], *row["output_images"]]):
            image.save(file.parent / name)
        rows.append({**row, "input_image": files[0], "output_images": files[1:]})
    write_lines(file, rows)


@pytest.fixture
def edits(examples, tmp_path):
    """Edit-Bench's ``evaluation.py`` on ``examples``."""
    data = tmp_path / "data" / "bench.JSONL"
    save_edit_bench(data, examples)
    arguments = ["--dataset", data, "--output", tmp_path / "summary"]
    return BenchCommand(edit, data, tmp_path, arguments)


@pytest.fixture
def choices(tmp_path):
    """VCReward-Bench's ``evaluation.py`` on eight rows."""
    rows = []
    for index in range(8):
        files = []
        for place, letter in enumerate("sab"):
            files.append(save_picture(tmp_path, f"{index}{letter}.png", 10 * index + place))
        rows.append(
            {
                "key": f"k{index}",
                "instruction": f"make it {index} times as red",
                "winner": str(int("01101001"[index])),
                "task": ("subject_add", "cref", "style")[index % 3],
                "source_image": files[0],
                "edited_images": files[1:],
            }
        )
    data = tmp_path / "rows.jsonl"
    write_lines(data, rows)
    return BenchCommand(vc, data, tmp_path, ["--dataset", data, "--output", tmp_path / "table"])


@pytest.fixture(scope="session")
def answering_judge(tmp_path_factory):
    """The quickstart's base judge, made to answer."""
    return save_answering(TOY_JUDGE, tmp_path_factory.mktemp("answering") / "judge")
