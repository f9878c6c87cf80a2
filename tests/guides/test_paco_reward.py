"""The published PaCo-Reward guide: training, and evaluation with the real vLLM."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from terminal import REPOSITORY

DATA_SETS = ("consistency_reward_cot_train", "sharegpt_editing_cot", "consistency_reward_cot_test")
TOY_SIZE = (
    "max_steps=1 global_batch_size=8 cutoff_len=512 image_max_pixels=4096 bf16=false preprocessing_num_workers=1 "
)
TOY_SIZE += "dataloader_num_workers=0 lora_rank=4 plot_loss=false"
VLLM = REPOSITORY / ".venv-vllm"
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="vLLM environment not installed")


def save_rank_bench(folder: Path, tiny) -> None:
    """ConsistencyRank-Bench as it is downloaded, with two items: its images are in an archive."""
    folder.mkdir()
    names = ["a.png", "b.png", "c.png"]
    ranks, prompts = [], []
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for index in range(2):
            for place, name in enumerate(["reference.png", *names]):
                tiny.picture(10 * index + place).save(folder / "picture.png")
                archive.write(folder / "picture.png", f"images/{index:04d}/{name}")
            ranks.append({"folder": f"{index:04d}", "ref_image": "reference.png", "comp_images": names})
            ranks[-1]["rank_images"] = names[index:] + names[:index]
            prompts.append({"idx": index, "prompt": "p", "criteria": {"style": {"a": "Same colors?"}}})
    (folder / "picture.png").unlink()
    for file, rows in (("consistency_full_rank.jsonl", ranks), ("prompt_data.jsonl", prompts)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_edit_bench(folder: Path, tiny) -> Path:
    """EditReward-Bench with one item of each dimension; returns its file."""
    rows = []
    for index, dimension in enumerate(["prompt_following", "consistency", "overall"]):
        files = [f"{index}_{name}.png" for name in ("input", "better", "worse")]
        for place, file in enumerate(files):
            tiny.picture(30 + place).save(folder / file)
        rows.append({"key": ["better", "worse"], "instruction": "make it blue", "task_type": "color_alter"})
        rows[-1] |= {"dimension": dimension, "input_image": files[0], "output_images": files[1:]}
    file = folder / "edits.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.long
@needs_vllm
def test_evaluation(new_terminal, tiny_judge):
    terminal = new_terminal(VLLM)
    bench = terminal.clone / "PaCo-Reward" / "evaluation" / "ConsistencyRank-Bench"
    save_rank_bench(bench, tiny_judge)
    output = terminal.run(
        """
# Activate an env with vllm installed
conda activate vllm

# Download dataset
hf download X-GenGroup/ConsistencyRank-Bench --repo-type dataset --local-dir ./ConsistencyRank-Bench

# Evaluate on ConsistencyRank
cd Consistency_Rank
python eval_vllm.py \\
  --model X-GenGroup/PaCo-Reward-7B \\
  --tensor_parallel_size 1 \\
  --gpu_memory_utilization 0.85 \\
  --batch_size 8

# Print evaluation table
python print_eval_table.py --results_dir results \\
  --output_file results_summary.txt \\
  --output_format txt
cat results_summary.txt
""",
        "PaCo-Reward/evaluation",
    )
    assert "PaCo-Reward-7B" in output.splitlines()[-1]
    (results,) = (bench.parent / "Consistency_Rank" / "results").glob("*.jsonl")
    assert len(results.read_text().splitlines()) == 2

    edits = save_edit_bench(bench, tiny_judge)
    output = terminal.run(
        f"""
conda activate vllm
cd ConsistencyRank-Bench/../Consistency_Rank

# Evaluate on Edit-Bench
cd ../Edit-Bench
bash evaluate_vllm_PaCoReward.sh --dataset {edits}
""",
        "PaCo-Reward/evaluation",
    )
    assert "overall" in output
    shutil.rmtree(terminal.clone)
