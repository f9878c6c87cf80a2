"""Named configurations of config/grpo.py, with overrides, for tests."""

from pathlib import Path

from paco_grpo.options import load_options

CONFIG = Path(__file__).resolve().parents[1] / "config"
NAMES = (
    "t2is", "kontext_editing", "qwen_editing", "ocr", "ocr_128", "ocr_512", "pickscore", "toy_t2is",
    "toy_t2is_awm", "toy_kontext", "toy_qwen_edit", "t2is_80gb", "t2is_48gb", "t2is_24gb", "kontext_editing_48gb", "kontext_editing_24gb",
    "qwen_editing_48gb", "qwen_editing_no_cfg", "kontext_editing_80gb", "qwen_editing_80gb", "klein_t2is", "klein_editing",
    "klein_t2is_9b", "klein_editing_9b", "flux2_t2is", "flux2_editing",
    "qwen_editing_2511", "qwen_editing_2511_48gb", "t2is_qwen", "t2is_qwen_48gb",
    "t2is_nft", "t2is_awm", "t2is_dgpo", "t2is_flow_dppo", "sd3_ocr", "sd3_ocr_nft", "sd3_ocr_awm", "sd3_ocr_dgpo",
    "sd3_ocr_flow_dppo", "sd3_t2is", "sd3_t2is_24gb", "sd3_large_t2is", "sd3_large_t2is_48gb", "sd3_large_t2is_24gb",
    "z_image_t2is", "z_image_t2is_48gb", "z_image_t2is_24gb", "z_image_turbo_t2is",
)  # fmt: skip


def load(name="toy_t2is", *overrides):
    """The options of a named configuration; ``overrides`` are pairs of name and text."""
    return load_options(f"{CONFIG / 'grpo.py'}:{name}", overrides)
