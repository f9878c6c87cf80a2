"""Every option is documented and changed by some test."""

import re
from pathlib import Path

from paco_grpo.options import OPTIONS
from paco_grpo.options.__main__ import page
from paco_grpo.options.schema import GROUPS, RunOptions

TESTS = Path(__file__).resolve().parents[1]


def test_a_test_changes_every_option():
    """Tests that run something: those in this folder only read, print or refuse options; ``__`` stands for a dot."""
    texts = [
        path.read_text()
        for path in TESTS.rglob("test_*.py")
        if path.parent != Path(__file__).parent
    ]
    mentioned = {
        word.replace("__", ".")
        for text in texts
        for word in re.findall(r"\b(?=((?:[a-z]+\.)?\w+))", text)
    }
    assert [
        option for option in OPTIONS if option not in mentioned
    ] == []  # add them to tests/training/test_options.py


def test_configuration_page_is_current():
    assert (TESTS.parents[1] / "docs" / "configuration.md").read_text() == page()
    assert all(option.description and f"| `{name}`" in page() for name, option in OPTIONS.items())


def test_page_marks_what_goes_beyond_the_paper():
    marked = set(re.findall(r"`([\w.]+)` †", page()))
    assert {"train.neighbor_factor", "train.awm_clip_range", "speed.compile"} <= marked
    published = {"train.learning_rate", "sample.noise_level", "train.nft_beta", "train.reward_fn"}
    assert marked.isdisjoint(published)


def test_nothing_can_be_written_into_options():
    assert all(group.__dataclass_params__.frozen for group in (RunOptions, *GROUPS.values()))
