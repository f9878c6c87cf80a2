"""A small ConsistencyRank-Bench in the real format, a judge of one line, and the commands as users type them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import ImageStat

from paco_judge.verdict import Verdict

HERE = Path(__file__).parent
FOLDER = HERE.parent / "evaluation" / "Consistency_Rank"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import eval_vllm
import consistency_rank
from consistency_rank import BENCH


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
def ranked(monkeypatch, bench, tmp_path):
    """Runs eval_vllm with a brightness judge: ranked(judge, "--flag", …) -> exit status."""

    def run(judge, *arguments):
        monkeypatch.setattr(consistency_rank, "make_engine", lambda args: ("brightness", judge))
        base = ["--model", "some/judge", "--dataset_dir", str(bench.parent), "--results_dir", str(tmp_path / "results")]
        return eval_vllm.main([*base, "--batch_size", "4", *arguments])

    return run


def results(tmp_path, template=3):
    text = (tmp_path / "results" / f"judge-v{template}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def typed(script, *arguments, python=sys.executable, **environment):
    """A command as users type it, started in its folder."""
    return subprocess.Popen(
        [str(python), script, *map(str, arguments)],
        cwd=FOLDER,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(process, timeout=280):
    """(exit status, stdout and stderr together) of a command that ends."""
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
    return process.returncode, output
