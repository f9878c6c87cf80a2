import pytest

from paco_grpo.options import OPTIONS, did_you_mean, suggest
from paco_grpo.options.suggest import suggestions

REWARDS = [
    "consistency_score",
    "consistency_for_editing",
    "subfig_clipT",
    "pickscore",
    "clipscore",
    "ocr",
    "pkg.mod:factory",
]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.lr", "train.learning_rate"),
        ("train.LR", "train.learning_rate"),
        ("train.bs", "train.batch_size"),
        ("train.eps", "train.adam_epsilon"),
        ("train.weight_decay", "train.adam_weight_decay"),
        ("train.learn_rate", "train.learning_rate"),
        ("train.resoluton", "train.resolution"),
        ("tran.resolution", "train.resolution"),
        ("Train.Learning-Rate", "train.learning_rate"),
        ("train.num_steps", "sample.num_steps"),
        ("sample.seed", "seed"),
        ("train.seed", "test.seed"),
        ("seeed", "seed"),
        ("max_seq_len", "max_sequence_length"),
        ("gradient_checkpointing", "enable_gradient_checkpointing"),
        ("speed.compil", "speed.compile"),
        ("train.zzz", None),
        ("x", None),
        ("", None),
    ],
)
def test_options(typed, meant):
    names = suggestions(typed, OPTIONS)
    assert meant in names if meant else names == []
    assert len(names) <= 3 and suggest(typed, OPTIONS) == (names[0] if names else None)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("consistency_scor", "consistency_score"),
        ("consistency", "consistency_score"),
        ("PickScore", "pickscore"),
        ("subfig_clipt", "subfig_clipT"),
        ("clipt", "subfig_clipT"),
        ("clip", "clipscore"),
        ("mod:factory", "pkg.mod:factory"),
        ("pkg.mod:facory", "pkg.mod:factory"),
        ("aesthetic", None),
    ],
)
def test_names(typed, meant):
    assert suggest(typed, REWARDS) == meant
    assert did_you_mean(typed, iter(REWARDS)) == (f" Did you mean {meant!r}?" if meant else "")


def test_complete_initials_come_before_other_abbreviations():
    assert suggestions("lr", ["lr_warmup_steps", "lora_rank", "learning_rate", "decay_of_lr"]) == [
        "lora_rank",
        "learning_rate",
    ]
    assert suggestions("mean", ["harmonic_mean", "mean_of_ranks"]) == ["mean_of_ranks"]
    assert suggestions("b.n_x", ["a.n_x", "b.n_xx"]) == ["a.n_x"]
    assert suggestions("n", ["number"]) == []
