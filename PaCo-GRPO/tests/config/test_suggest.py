"""Guesses for misspelt or abbreviated names."""

import pytest

from paco_grpo.options import OPTIONS, did_you_mean, suggest
from paco_grpo.suggest import suggestions

REWARDS = [
    "consistency_score", "consistency_for_editing", "subfig_clipT", "pickscore", "clipscore", "ocr", "pkg.mod:factory",
]  # fmt: skip
# Guess → what was typed.
OPTION_GUESSES = {
    "train.learning_rate": ["train.lr", "train.LR", "train.learn_rate", "Train.Learning-Rate"],
    "train.batch_size": ["train.bs"],
    "train.adam_epsilon": ["train.eps"],
    "train.adam_weight_decay": ["train.weight_decay"],
    "train.resolution": ["train.resoluton", "tran.resolution"],
    "sample.num_steps": ["train.num_steps"],
    "seed": ["sample.seed", "seeed"],
    "test.seed": ["train.seed"],
    "max_sequence_length": ["max_seq_len"],
    "enable_gradient_checkpointing": ["gradient_checkpointing"],
    "speed.compile": ["speed.compil"],
    None: ["train.zzz", "x", ""],
}
REWARD_GUESSES = {
    "consistency_score": ["consistency_scor", "consistency"],
    "pickscore": ["PickScore"],
    "subfig_clipT": ["subfig_clipt", "clipt"],
    "clipscore": ["clip"],
    "pkg.mod:factory": ["mod:factory", "pkg.mod:facory"],
    None: ["aesthetic"],
}


@pytest.mark.parametrize("meant", OPTION_GUESSES)
def test_options(meant):
    for typed in OPTION_GUESSES[meant]:
        names = suggestions(typed, OPTIONS)
        assert meant in names if meant else names == []
        assert len(names) <= 3 and suggest(typed, OPTIONS) == (names[0] if names else None)


@pytest.mark.parametrize("meant", REWARD_GUESSES)
def test_rewards(meant):
    for typed in REWARD_GUESSES[meant]:
        assert suggest(typed, REWARDS) == meant
        assert did_you_mean(typed, iter(REWARDS)) == (f" Did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    ("typed", "known", "guesses"),
    [
        ("lr", ["lr_warmup_steps", "lora_rank", "learning_rate", "decay_of_lr"], ["lora_rank", "learning_rate"]),
        ("mean", ["harmonic_mean", "mean_of_ranks"], ["mean_of_ranks"]),
        ("b.n_x", ["a.n_x", "b.n_xx"], ["a.n_x"]),
        ("n", ["number"], []),
    ],
)
def test_order_of_guesses(typed, known, guesses):
    assert suggestions(typed, known) == guesses
