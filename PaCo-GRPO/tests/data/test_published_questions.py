"""`fetch.py questions` on a clone of the published layout with words of our own."""

import shlex
from pathlib import Path

import pytest
from fakes import fake_judge
from wired import IMAGES, ITEMS, respond

from paco_grpo.options import load_options
from paco_grpo.rewards.registry import build_rewards
from paco_judge.questions import load_editing_questions, load_question

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "config" / "grpo.py"
EDITING = """
class Helper:
    consistency_text_prompt = "not this one"


class ConsistencyScorerForEditing:
    async def __async_call__(self, images, prompts):
        async def one(prompt, image):
            # consistency_text_prompt = f"an older one {prompt}"
            consistency_text_prompt = (
                f"Kept, but for '{prompt}'? "
                f"\\"Yes\\" or No.\\n"
            )
            prompt_following_text_prompt = "Done: " + f"{prompt}?"
            return consistency_text_prompt, prompt_following_text_prompt
"""
GRID = """
class ConsistencyScorer:
    async def _async_compute_image_consistency(self, prompt, image, criteria_text):
        if self.prompt_template_version == 0:
            text_prompt = f"Zero {criteria_text} and {criteria_text}"
        elif self.prompt_template_version == 1:
            main_prompt = divide(prompt)[0]
            text_prompt = (f"One \\"{main_prompt}\\", " f"no?")
        elif self.prompt_template_version == 2:
            if self.cache:
                return 0.0
            text_prompt = f"Two {main_prompt}"
        else:
            text_prompt = f"None of these {criteria_text}"
"""
BENCH = """
from editing import ConsistencyScore as Other

class ConsistencyScore:
    def evaluate(self, images, text_prompt):
        consistency_text_prompt = f"Bench kept '{text_prompt}'"
        prompt_following_text_prompt = f"Bench done '{text_prompt}'"

    def batch_evaluate(self, images, text_prompts):
        for text_prompt in text_prompts:
            consistency_text_prompt = f"Bench kept '{text_prompt}'"
            prompt_following_text_prompt = f"Bench done '{text_prompt}'"
"""
RANK = """
class Scorer:
    def compute_image_consistency(self, first, second, criteria_text, prompt=None):
        if self.prompt_template == 1:
            text_prompt = f"Rank {criteria_text}!"
        elif self.prompt_template == 2:
            text_prompt = "Rank two"
        elif self.prompt_template == 3:
            text_prompt = f"Rank three, öäü"
        return text_prompt

    def batch_compute(self):
        if self.prompt_template == 1:
            text_prompt = "another"
"""
FILES = {
    "PaCo-GRPO/paco_grpo/rewards/consistency_for_editing.py": EDITING,
    "PaCo-GRPO/paco_grpo/rewards/consistency_scorer.py": GRID,
    "PaCo-Reward/evaluation/Edit-Bench/editscore/__init__.py": BENCH,
    "PaCo-Reward/evaluation/Consistency_Rank/consistency_scorer_vllm.py": RANK,
}
TEXTS = {
    "editing_consistency": "Kept, but for '{instruction}'? \"Yes\" or No.\n",
    "editing_instruction": "Done: {instruction}?",
    "grid_0": "Zero {criterion} and {criterion}",
    "grid_1": 'One "{theme}", no?',
    "grid_2": "Two {theme}",
    "edit_bench_consistency": "Bench kept '{instruction}'",
    "edit_bench_instruction": "Bench done '{instruction}'",
    "rank_1": "Rank {criterion}!",
    "rank_2": "Rank two",
    "rank_3": "Rank three, öäü",
}


@pytest.fixture
def clone(source):
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return source


def test_each_question_is_the_one_of_its_place(fetch, clone, tmp_path):
    assert fetch.run("questions") == 0
    found = {}
    for file in (tmp_path / "out").iterdir():
        question = load_question(str(file))
        found[question.name.removeprefix("published_")] = question.template
    assert found == TEXTS


def test_training_and_benchmarks_take_what_is_printed(fetch, clone, tmp_path, capsys):
    assert fetch.run("questions", "--output", str(tmp_path / "with space")) == 0
    words = shlex.split(capsys.readouterr().out)
    (option,) = (word for word in words if "consistency_for_editing" in word)
    name, _, value = option.removeprefix("--config.").partition("=")
    options = load_options(f"{CONFIGURATIONS}:kontext_editing", [(name, value)])
    with fake_judge.FakeJudge(respond) as server:
        kwargs = options.train.reward_fn_kwargs
        kwargs["consistency_for_editing"]["base_url"] = server.url
        rewards = build_rewards({"consistency_for_editing": 1.0}, kwargs)
        rewards["consistency_for_editing"](IMAGES[:1], ITEMS[:1])
    asked = {fake_judge.request_content(request)[1] for request in server.requests}
    fields = ("editing_consistency", "editing_instruction")
    assert asked == {TEXTS[name].replace("{instruction}", ITEMS[0].prompt) for name in fields}
    files = [word for word in words if word.endswith(".txt") and "=" not in word]
    kept, followed = load_editing_questions(files[:2])
    assert (kept.template, followed.template) == (
        TEXTS["edit_bench_consistency"],
        TEXTS["edit_bench_instruction"],
    )
    assert load_question(files[2], ("theme", "criterion")).template == TEXTS["rank_3"]


@pytest.mark.parametrize(
    ("number", "old", "new", "named"),
    [
        (0, EDITING, None, "git clone"),
        (1, GRID, "def (", "no Python file"),
        (0, "ConsistencyScorerForEditing", "Another", "consistency_text_prompt"),
        (1, "_version == 2", "_version > 2", "version 2"),
        (
            2,
            '            consistency_text_prompt = f"Bench kept',
            '            consistency_text_prompt = f"Held',
            "two texts",
        ),
        (3, "{criteria_text}", "{criteria_text.strip()}", "criteria_text.strip()"),
        (3, '"Rank two"', '"Rank {theme}"', "{theme}"),
    ],
)
def test_another_layout_is_one_sentence(fetch, clone, tmp_path, capsys, number, old, new, named):
    file = clone / list(FILES)[number]
    if new is None:
        file.unlink()
    else:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    assert fetch.run("questions") == 1
    message = capsys.readouterr().err
    assert named in message and str(clone) in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()
