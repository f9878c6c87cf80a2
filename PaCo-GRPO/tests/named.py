"""Named configurations of config/grpo.py, with overrides, for tests."""

from pathlib import Path

from paco_grpo.options import load_options

CONFIG = Path(__file__).resolve().parents[1] / "config"
NAMES = (
    "t2is", "kontext_editing", "qwen_editing", "ocr", "ocr_128", "ocr_512", "pickscore", "toy_t2is", "toy_kontext",
    "toy_qwen_edit", "t2is_80gb", "t2is_48gb", "t2is_24gb", "kontext_editing_48gb", "kontext_editing_24gb",
    "qwen_editing_48gb", "qwen_editing_no_cfg",
)  # fmt: skip


def load(name="toy_t2is", *overrides):
    """The options of a named configuration; ``overrides`` are pairs of name and text."""
    return load_options(f"{CONFIG / 'grpo.py'}:{name}", overrides)
