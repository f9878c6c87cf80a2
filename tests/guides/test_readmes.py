"""Every command block of the READMEs, in the order of the page, each in a fresh shell, with toy sizes and tiny weights."""

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

from paco_toy.build_world import draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]  # on a busy machine they take more than the usual 600 s

GRID = "FOUR-PANEL Images with a 2x2 grid layout depicting a fox. [TOP]-[LEFT]:a. [TOP]-[RIGHT]:b. [BOTTOM]-[LEFT]:c. [BOTTOM]-[RIGHT]:d."
# Page → {command: what runs instead}. Commands that cannot run here only read their options.
REPLACED = {
    "README.md": {
        "bash setup.sh --vllm": f"bash setup.sh --help && ln -sfn {sys.prefix} .venv",  # installs gigabytes
        "bash quickstart/run.sh": "bash quickstart/run.sh --help",  # 13 minutes: quickstart/tests/test_whole.py
        "bash quickstart/editing.sh": "bash quickstart/editing.sh --help",  # 8 minutes: quickstart/tests/test_whole.py
        "t2is_80gb --": "t2is --",  # compiling takes minutes
        "subfig_clipT.py": "subfig_clipT.py || true",  # no tiny weights have OpenCLIP's size: tests/guides/test_published.py
    },
    "PaCo-GRPO/README.md": {
        "bash setup.sh": "bash setup.sh --help",
        "train_flux.sh t2is_80gb": "train_flux.sh t2is",  # compiling takes minutes
        "bash vllm_server/stop.sh": "bash vllm_server/status.sh",  # later blocks ask the judge; the fixture stops it
        "python dataset/fetch.py t2is": "python dataset/fetch.py --help",  # needs the hub: PaCo-GRPO/tests/data/test_public_sets.py
        "2x2 grid layout …": GRID,
        "http://127.0.0.1:8000": "JUDGE_URL",
    },
    "PaCo-Reward/README.md": {
        "path/to/judge": "X-GenGroup/PaCo-Reward-7B",
        "paco-reward demo": "paco-reward demo --help; :",  # serves until Ctrl-C: PaCo-Reward/tests/test_demo.py
        "config/paco_reward_lora_16gb.yaml": "config/paco_reward_lora_16gb.yaml quantization_bit=null",  # CUDA only
        "config/toy_reward_lora.yaml": "config/toy_reward_lora.yaml dataset_dir=PaCo-Dataset dataset=consistency_reward_cot_train",
        "--base BASE": "--base Qwen/Qwen2.5-VL-7B-Instruct",
        "--model BASE": "--model Qwen/Qwen2.5-VL-7B-Instruct",
        "--dataset NAME": "--dataset consistency_reward_cot_test",
        "--model NAME": "--model Paco-Reward-7B",
        "--output PaCo-Dataset --": "--output ranked_by_people --",  # the other way is tried in the block before
        "--sets_only": "--sets_only && python -m paco_toy.build_world annotate --out . --sets ranked_by_people/sets.jsonl",
        "--rankings ranked.jsonl": "--rankings rankings.jsonl",
        ".venv-vllm": ".venv",
        "--tensor_parallel_size 1 --gpu_memory_utilization 0.85": "--engine transformers",
        "evaluate_vllm_PaCoReward.sh": "evaluate_vllm_PaCoReward.sh --engine transformers --dataset edits.jsonl",
        "--scorer clip_i": "--help; :",  # as subfig_clipT.py
        "eval.py --model Qwen/": "eval.py --engine transformers --model Qwen/",
        "http://127.0.0.1:8000": "JUDGE_URL",
    },
}  # fmt: skip
EDITORS = (
    "bash scripts/single_node/train_flux_kontext.sh kontext_editing",
    "bash scripts/single_node/train_qwenimage_edit.sh qwen_editing",
)
TOY_CONFIG = """

def _toy(configuration):
    def small():
        config = configuration()
        for arguments in config.train.reward_fn_kwargs.values():
            arguments["port"] = PORT
        if "subfig_clipT" in config.train.reward_fn:
            clip = {"model": "OPEN_CLIP", "pretrained": None}
            config.train.reward_fn_kwargs["subfig_clipT"] = clip
        for name, value in SIZES.items():
            group, _, option = name.rpartition(".")
            (config[group] if group else config)[option] = value
        return config

    return small


t2is = _toy(t2is)
kontext_editing = _toy(kontext_editing)
qwen_editing = _toy(qwen_editing)
"""


def run_page(
    terminal, page: str, port: int, judge_url: str = "", after_block=lambda number: None
) -> None:
    used, url = set(), judge_url or f"http://127.0.0.1:{port}"
    blocks = re.findall(
        r"^ *```bash\n(.*?)^ *```", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE
    )
    for number, block in enumerate(blocks):
        used |= {old for old in REPLACED[page] if old in block}
        for old, new in REPLACED[page].items():
            block = block.replace(old, new.replace("JUDGE_URL", url))
        folder = terminal.clone / Path(page).parent
        if "bash setup.sh" in block:
            folder = terminal.clone
        elif page != "README.md":
            block = "source ../.venv/bin/activate\n" + block
        terminal.run(block, folder, VLLM_PORT=port)
        after_block(number)
    assert used == set(REPLACED[page])


@pytest.fixture
def port(terminal, open_clip) -> int:
    """The judge's port; toy sizes and data are in the clone."""
    port, clone = free_port(), terminal.clone
    text = (
        TOY_CONFIG.replace("PORT", str(port))
        .replace("OPEN_CLIP", open_clip)
        .replace("SIZES", repr(TOY_SIZE))
    )
    published = (REPOSITORY / "PaCo-GRPO" / "config" / "grpo.py").read_text()
    (clone / "PaCo-GRPO" / "config" / "grpo.py").write_text(published + text)
    for file in (REPOSITORY / "PaCo-Reward" / "config").glob("*.yaml"):
        values = yaml.safe_load(file.read_text()) | TOY_JUDGE
        (clone / "PaCo-Reward" / "config" / file.name).write_text(yaml.safe_dump(values))
    data = clone / "PaCo-Reward" / "PaCo-Dataset"
    for name in DATA_SETS:
        tiny_judge.save_pairs(data, 8, name)
    # As on the hub: the images are in an archive.
    shutil.make_archive(str(data / "images"), "gztar", data, "images")
    shutil.rmtree(data / "images")
    (data / "decompress.sh").write_text("tar -xzf images.tar.gz && rm images.tar.gz\n")
    (clone / ".venv").unlink(missing_ok=True)
    (clone / ".venv").symlink_to(sys.prefix)
    return port


def test_front_page(terminal, port):
    run_page(terminal, "README.md", port)
    assert "before" in (terminal.clone / "PaCo-GRPO" / "runs" / "first" / "report.html").read_text()
    assert (terminal.clone / "PaCo-Reward" / "models" / "PaCo-Reward-7B" / "config.json").is_file()


def test_trainer(terminal, port):
    trainer = terminal.clone / "PaCo-GRPO"
    shutil.rmtree(trainer / "runs", ignore_errors=True)
    shutil.copytree(
        trainer / "dataset" / "T2IS", trainer / "dataset" / "public-t2is"
    )  # python dataset/fetch.py t2is
    save_editing_set(trainer / "dataset" / "public-sharegpt-4o-image")
    Image.new("RGB", (64, 64), "red").save(trainer / "photo.png")

    def name_run(number: int) -> None:
        if number == 1:  # the first run
            (trainer / "runs" / "NAME").symlink_to("first")
            (trainer / "runs" / "first" / "checkpoints" / "epoch_0010").symlink_to("epoch_0002")

    run_page(terminal, "PaCo-GRPO/README.md", port, after_block=name_run)
    for command in EDITORS:  # also the guide's
        assert command in (trainer / "README.md").read_text()
        (run,) = (trainer / "runs").glob(f"{command.split()[-1]}*")
        check_learning(run, "consistency_for_editing")
    assert (trainer / "evaluation" / "t2is" / "results.md").is_file() and (
        trainer / "generated" / "sheet.png"
    ).is_file()


def test_judge(terminal, port):
    folder = terminal.clone / "PaCo-Reward"
    for number, name in enumerate(("a", "b", "c", "photo", "edit1", "edit2")):
        tiny_judge.picture(number).save(folder / f"{name}.png")
    (folder / "mine.txt").write_text("Are these two images alike?")
    pairs = "image1,image2,label\na.png,b.png,Yes\nc.png,photo.png,No\n"
    (folder / "my_pairs.csv").write_text(pairs)
    draw(folder, seed=0, prompts={"train": 6, "test": 3})
    (folder / "metadata.jsonl").rename(folder / "prompts.jsonl")
    save_rank_bench(folder / "evaluation" / "Consistency_Rank" / "ConsistencyRank-Bench", 2)
    save_edit_bench(folder / "evaluation" / "Edit-Bench" / "edits.jsonl", edit_examples(3))
    with fake_judge.FakeJudge(pairing_tools.colour_model) as server:
        run_page(terminal, "PaCo-Reward/README.md", port, server.url)
    assert (folder / "scores.html").is_file()
    assert json.loads((folder / "PaCo-Dataset" / "dataset_info.json").read_text())
    assert (
        "PaCo-Reward-7B"
        in (folder / "evaluation" / "Edit-Bench" / "results_summary.txt").read_text()
    )
