"""The published guides, block by block: weights, servers, evaluation, and the whole quick start."""

import shlex

import httpx
import pytest
import tiny_judge
from bench_tools import edit_examples, save_edit_bench, save_rank_bench
from fakes import free_port
from terminal import DATA_SETS, REPOSITORY, TOY_JUDGE, TOY_SIZE, check_learning

pytestmark = pytest.mark.slow
VLLM = REPOSITORY / ".venv-vllm"
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="vLLM environment not installed")
in_vllm = pytest.mark.parametrize("terminal", [VLLM], indirect=True)

WEIGHTS = {
    "python paco_grpo/rewards/pickscore_scores.py": "in the cache",
    # OpenCLIP's name stands for a size that no tiny weights have. It is not in the cache, which is
    # explained.
    "python paco_grpo/rewards/subfig_clipT.py || true": "HF_ENDPOINT",
    "hf download X-GenGroup/PaCo-Reward-7B": "snapshots",
    "hf download X-GenGroup/Paco-Reward-7B": "snapshots",
}
ONE_PORT = """
export VLLM_MODEL_PATHS="X-GenGroup/PaCo-Reward-7B,google/gemma-3-4b-it"
export VLLM_MODEL_NAMES="Paco-Reward-7B,Gemma-3-4B-IT"
export VLLM_PORT=8000
export VLLM_LABEL='multi_server'
bash vllm_server/launch.sh
"""


def test_weights_are_fetched_before_training(terminal):
    for command, answer in WEIGHTS.items():
        assert answer in terminal.run(f"conda activate paco-grpo\n{command}", "PaCo-GRPO"), command


def test_servers(terminal):
    port = str(free_port())
    terminal.run("conda activate vllm\n" + ONE_PORT.replace("8000", port), "PaCo-GRPO")
    models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
    assert {model["id"] for model in models} == {"Gemma-3-4B-IT", "Paco-Reward-7B"}


EVALUATION = """
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

# Evaluate on Edit-Bench
cd ../Edit-Bench
bash evaluate_vllm_PaCoReward.sh"""


@pytest.mark.long
@needs_vllm
@in_vllm
def test_evaluation(terminal):
    folder = terminal.clone / "PaCo-Reward" / "evaluation"
    save_rank_bench(folder / "ConsistencyRank-Bench", 2)
    edits = folder / "edits" / "edits.jsonl"
    save_edit_bench(edits, edit_examples(3))
    output = terminal.run(f"{EVALUATION} --dataset {edits}", folder)
    summary = (folder / "Consistency_Rank" / "results_summary.txt").read_text()
    assert "PaCo-Reward-7B" in summary.splitlines()[-1]
    (results,) = (folder / "Consistency_Rank" / "results").glob("*.jsonl")
    assert len(results.read_text().splitlines()) == 2
    assert "overall" in output


QUICK_START = """
git clone https://github.com/X-GenGroup/PaCo-RL.git
cd PaCo-RL

cd PaCo-Reward
conda create -n paco-reward python=3.12 -y
conda activate paco-reward
cd LLaMA-Factory && pip install -e ".[torch,metrics]" --no-build-isolation
cd .. && bash train/paco_reward.sh $JUDGE_OPTIONS
cd ..

cd PaCo-GRPO
conda create -n paco-grpo python=3.12 -y
conda activate paco-grpo
pip install -e .

# Setup vLLM reward server
conda create -n vllm python=3.12 -y
conda activate vllm && pip install vllm
export CUDA_VISIBLE_DEVICES=0
export VLLM_MODEL_PATHS='X-GenGroup/PaCo-Reward-7B'
export VLLM_MODEL_NAMES='Paco-Reward-7B'
bash vllm_server/launch.sh

# Start training
export CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7
conda activate paco-grpo
bash scripts/single_node/train_flux.sh t2is """


@pytest.mark.long
@needs_vllm
@in_vllm
def test_quick_start(terminal, open_clip):
    port = free_port()
    for name in DATA_SETS:
        tiny_judge.save_pairs(terminal.clone / "PaCo-Reward" / "PaCo-Dataset", 8, name)
    clip = {"model": open_clip, "pretrained": None}
    judge = {"port": port, "model": "Paco-Reward-7B"}
    options = TOY_SIZE | {
        "save_dir": "runs",
        "train.reward_fn_kwargs.subfig_clipT": clip,
        "train.reward_fn_kwargs.subfig_clipI": clip,
        "train.reward_fn_kwargs.consistency_score": judge,
    }
    words = [shlex.quote(f"--config.{name}={value}") for name, value in options.items()]
    home = terminal.clone.parent / "home"
    home.mkdir()
    judge_options = " ".join(f"{name}={str(value).lower()}" for name, value in TOY_JUDGE.items())
    output = terminal.run(
        QUICK_START + " ".join(words), home, VLLM_PORT=port, JUDGE_OPTIONS=judge_options
    )
    assert "Engine: vllm" in output
    (run,) = (home / "PaCo-RL" / "PaCo-GRPO" / "runs").iterdir()
    check_learning(run, "consistency_score")
