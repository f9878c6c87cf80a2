"""The published root guide from its first line to its last, in one folder."""

import shlex

import pytest
from terminal import REPOSITORY, free_port
from test_paco_grpo import TOY_SIZE, check_learning, metrics
from test_paco_reward import DATA_SETS
from test_paco_reward import TOY_SIZE as TOY_JUDGE

VLLM = REPOSITORY / ".venv-vllm"


@pytest.mark.long
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM environment not installed")
def test_quick_start(new_terminal, tiny_judge, open_clip):
    terminal, port = new_terminal(VLLM), free_port()
    for name in DATA_SETS:
        tiny_judge.save_pairs(terminal.clone / "PaCo-Reward" / "PaCo-Dataset", 8, name)
    clip = f"--config.train.reward_fn_kwargs.subfig_clipT={{'model': '{open_clip}', 'pretrained': None}}"
    server = f"--config.train.reward_fn_kwargs.consistency_score={{'port': {port}, 'model': 'Paco-Reward-7B'}}"
    options = " ".join(map(shlex.quote, (*TOY_SIZE, clip, server)))
    home = terminal.clone.parent / "home"
    home.mkdir()
    try:
        output = terminal.run(
            f"""
git clone https://github.com/X-GenGroup/PaCo-RL.git
cd PaCo-RL

cd PaCo-Reward
conda create -n paco-reward python=3.12 -y
conda activate paco-reward
cd LLaMA-Factory && pip install -e ".[torch,metrics]" --no-build-isolation
cd .. && bash train/paco_reward.sh {TOY_JUDGE}
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
bash scripts/single_node/train_flux.sh t2is {options}
""",
            home,
            VLLM_PORT=port,
        )
    finally:
        terminal.stop_servers()
    assert "Engine: vllm" in output
    check_learning(metrics(home / "PaCo-RL"), "consistency_score")
