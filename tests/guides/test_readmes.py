"""Every command block of the READMEs, in page order, each in a fresh shell.

Models, data and sizes are tiny. What a page takes for granted (files, folders, a judge's name) is
made before its blocks run, so that few commands have to be changed: see ``REPLACED``.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pairing_tools
import pytest
import tiny_judge
import yaml
from bench_tools import edit_examples, save_edit_bench, save_rank_bench
from fakes import fake_judge, free_port
from PIL import Image
from terminal import DATA_SETS, REPOSITORY, TOY_JUDGE, TOY_SIZE, check_learning, save_editing_set

from paco_toy.build_world import annotate, draw

# On a busy machine they take more than the usual 600 s.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# Programs that install gigabytes or run for 10 minutes: they only read their options here, and
# tools/tests/test_setup.py and quickstart/tests run them.
READ_OPTIONS = ("setup.sh", "test.sh", "quickstart/run.sh", "quickstart/editing.sh")
GRID = (
    "FOUR-PANEL Images with a 2x2 grid layout depicting a fox. "
    "[TOP]-[LEFT]:a. [TOP]-[RIGHT]:b. [BOTTOM]-[LEFT]:c. [BOTTOM]-[RIGHT]:d."
)
# Page → {text of a command: what runs instead}.
REPLACED = {
    "README.md": {
        # No tiny weights have OpenCLIP's size: tests/guides/test_published.py.
        "subfig_clipT.py": "subfig_clipT.py || true",
    },
    "PaCo-GRPO/README.md": {
        # It needs the hub: PaCo-GRPO/tests/data/test_public_sets.py.
        "python dataset/fetch.py t2is": "python dataset/fetch.py --help",
        "2x2 grid layout …": GRID,
        "http://127.0.0.1:8000": "JUDGE_URL",
    },
    "PaCo-Reward/README.md": {
        # It serves until Ctrl-C: PaCo-Reward/tests/test_demo.py.
        "paco-reward demo": "paco-reward demo --help; :",
        "--scorer clip_i": "--help; :",  # as subfig_clipT.py
        # vLLM starts in PaCo-Reward/tests/test_bench_engines.py.
        "--tensor_parallel_size 1 --gpu_memory_utilization 0.85": "--engine transformers",
        "PaCoReward.sh": "PaCoReward.sh --engine transformers --dataset edits.jsonl",
        "eval.py --model Qwen/": "eval.py --engine transformers --model Qwen/",
        "http://127.0.0.1:8000": "JUDGE_URL",
    },
}
# Added to config/grpo.py: the configurations of the pages, made small.
TOY_CONFIG = """

def _toy(configuration):
    def small():
        config = configuration()
        for arguments in config.train.reward_fn_kwargs.values():
            arguments["port"] = PORT
        for name in ("subfig_clipT", "subfig_clipI", "reference_clipI"):
            if name in config.train.reward_fn or name in config.test.reward_fn:
                clip = {"model": "OPEN_CLIP", "pretrained": None}
                config.train.reward_fn_kwargs[name] = clip
        for name, value in SIZES.items():
            group, _, option = name.rpartition(".")
            (config[group] if group else config)[option] = value
        return config

    return small


def _for_80gb_without_compiling(config):
    for_80gb(config)
    config.speed.compile = False


SUFFIXES["_80gb"] = _for_80gb_without_compiling
t2is_variety = _toy(t2is_variety)
t2is = _toy(t2is)
kontext_editing = _toy(kontext_editing)
qwen_editing = _toy(qwen_editing)
qwen_editing_80gb = qwen_editing
"""


def run_page(terminal, page: str, port: int, judge_url: str = "", actions: dict | None = None):
    """Run the blocks of ``page``; ``actions``: what to do after the block of a number."""
    url = judge_url or f"http://127.0.0.1:{port}"
    text = (REPOSITORY / page).read_text()
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    for command in REPLACED[page]:
        assert command in "".join(blocks), "not on the page any more"
    for number, block in enumerate(blocks):
        for command, replacement in REPLACED[page].items():
            block = block.replace(command, replacement.replace("JUDGE_URL", url))
        folder = terminal.clone / Path(page).parent
        if "bash setup.sh" in block:
            folder = terminal.clone
        elif page != "README.md":
            block = "source ../.venv/bin/activate\n" + block
        terminal.run(block, folder, VLLM_PORT=port)
        if actions and number in actions:
            actions[number]()


@pytest.fixture
def port(terminal, open_clip) -> int:
    """The judge's port; toy sizes and data are in the clone."""
    port = free_port()
    clone = terminal.clone
    for name in (".venv", ".venv-vllm"):
        (clone / name).unlink(missing_ok=True)
        (clone / name).symlink_to(sys.prefix)
    for name in READ_OPTIONS:
        program = (clone / name).rename(clone / f"{name}.whole")
        (clone / name).write_text(f'bash "{program}" "$@" --help\n')

    toy = TOY_CONFIG.replace("PORT", str(port)).replace("OPEN_CLIP", open_clip)
    configurations = clone / "PaCo-GRPO" / "config" / "grpo.py"
    with configurations.open("a") as file:
        file.write(toy.replace("SIZES", repr(TOY_SIZE)))

    for file in (clone / "PaCo-Reward" / "config").glob("*.yaml"):
        values = yaml.safe_load(file.read_text()) | TOY_JUDGE
        values.pop("quantization_bit", None)  # needs CUDA
        file.write_text(yaml.safe_dump(values))
    tiny_judge.save_pairs(
        clone / "quickstart" / "out" / "world" / "reward_data", 8, "toy_pairs_cot_train"
    )
    data = clone / "PaCo-Reward" / "PaCo-Dataset"
    for name in (*DATA_SETS, "NAME"):
        tiny_judge.save_pairs(data, 8, name)
    # As on the hub: the images are in an archive.
    shutil.make_archive(str(data / "images"), "gztar", data, "images")
    shutil.rmtree(data / "images")
    (data / "decompress.sh").write_text("tar -xzf images.tar.gz && rm images.tar.gz\n")
    return port


def test_front_page(terminal, port):
    run_page(terminal, "README.md", port)
    assert "before" in (terminal.clone / "PaCo-GRPO" / "runs" / "first" / "report.html").read_text()
    assert (terminal.clone / "PaCo-Reward" / "models" / "PaCo-Reward-7B" / "config.json").is_file()


def test_first_run(terminal, port):
    page = (REPOSITORY / "docs" / "first-run.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    terminal.run(f"source ../.venv/bin/activate\n{block}", "PaCo-GRPO")
    run = terminal.clone / "PaCo-GRPO" / "runs" / "mine"
    *_, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert (last["phase"], last["epoch"]) == ("eval", 6) and "eval/brightness_mean" in last
    assert (run / "report.html").is_file()


EDITORS = (
    "bash scripts/single_node/train_flux_kontext.sh kontext_editing",
    "bash scripts/single_node/train_qwenimage_edit.sh qwen_editing",
)
LAUNCH = (
    "VLLM_MODEL_PATHS=X-GenGroup/PaCo-Reward-7B VLLM_MODEL_NAMES=PaCo-Reward-7B "
    "bash vllm_server/launch.sh"
)


def test_trainer(terminal, port):
    trainer = terminal.clone / "PaCo-GRPO"
    runs = trainer / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    # What python dataset/fetch.py t2is writes.
    shutil.copytree(trainer / "dataset" / "T2IS", trainer / "dataset" / "public-t2is")
    save_editing_set(trainer / "dataset" / "public-sharegpt-4o-image")
    Image.new("RGB", (64, 64), "red").save(trainer / "photo.png")

    def name_first_run() -> None:
        (runs / "NAME").symlink_to("first")
        (runs / "first" / "checkpoints" / "epoch_0010").symlink_to("epoch_0002")

    def start_judge_again() -> None:
        start = f"source ../.venv/bin/activate\n{LAUNCH}"
        terminal.run(start, "PaCo-GRPO", VLLM_PORT=port)

    actions = {1: name_first_run, 2: start_judge_again}
    run_page(terminal, "PaCo-GRPO/README.md", port, actions=actions)
    for command in EDITORS:  # also the guide's
        assert command in (trainer / "README.md").read_text()
        (run,) = runs.glob(f"{command.split()[-1]}*")
        check_learning(run, "consistency_for_editing")
    assert (trainer / "evaluation" / "t2is" / "results.md").is_file()
    assert (trainer / "generated" / "sheet.png").is_file()


# Names that stand for a model on the judge's page.
MODEL_PLACES = (
    "BASE",
    "path/to/judge",
    "evaluation/Consistency_Rank/path/to/judge",
    "evaluation/Edit-Bench/path/to/judge",
)
MY_PAIRS = """image1,image2,label
a.png,b.png,Yes
c.png,photo.png,No
d.png,e.png,Yes
edit1.png,edit2.png,No
"""


def test_judge(terminal, port, published):
    folder = terminal.clone / "PaCo-Reward"
    for place in MODEL_PLACES:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(published["X-GenGroup/PaCo-Reward-7B"])
    for number, name in enumerate(("a", "b", "c", "d", "e", "photo", "edit1", "edit2")):
        tiny_judge.picture(number).save(folder / f"{name}.png")
    (folder / "mine.txt").write_text("Are these two images alike?")
    (folder / "my_pairs.csv").write_text(MY_PAIRS)
    draw(folder, seed=0, prompts={"train": 6, "test": 3})
    (folder / "metadata.jsonl").rename(folder / "prompts.jsonl")
    save_rank_bench(folder / "evaluation" / "Consistency_Rank" / "ConsistencyRank-Bench", 2)
    save_edit_bench(folder / "evaluation" / "Edit-Bench" / "edits.jsonl", edit_examples(3))

    def rank_by_people() -> None:
        """The judge's own pairs make room for those that people rank."""
        (folder / "my_dataset").rename(folder / "ranked_by_the_judge")
        sets_only = "--grids grids --metadata prompts.jsonl --output sets --sets_only"
        activate = "source ../.venv/bin/activate\n"
        terminal.run(f"{activate}paco-reward build-dataset {sets_only}", folder)
        annotate(folder, folder / "sets" / "sets.jsonl")
        (folder / "rankings.jsonl").rename(folder / "ranked.jsonl")

    with fake_judge.FakeJudge(pairing_tools.judge_model, models=["NAME"]) as server:
        actions = {4: rank_by_people}
        run_page(terminal, "PaCo-Reward/README.md", port, server.url, actions)
    assert (folder / "scores.html").is_file()
    for name in ("ranked_by_the_judge", "my_dataset", "my_data"):
        assert json.loads((folder / name / "dataset_info.json").read_text())
    summary = folder / "evaluation" / "Edit-Bench" / "results_summary.txt"
    assert "judge" in summary.read_text()
