"""What a memory suffix promises holds for every model, by the table of tools/memory_table.py."""

import dataclasses
import logging
import random
import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from named import CONFIG, REAL, load

from paco_grpo.estimate.generator import RESERVE, estimate
from paco_grpo.estimate.report import GPUS, assumed_share
from paco_grpo.estimate.table import GIB, SUFFIXES, read, settings_of
from paco_grpo.options.parse import load_options
from paco_grpo.training.checks import out_of_memory, warn_of_small_gpu

REPOSITORY = CONFIG.parents[1]
TOOL = runpy.run_path(str(REPOSITORY / "tools" / "memory_table.py"))
ROWS = read()
USABLE = {gigabytes: GPUS[card][0] for gigabytes, card in TOOL["CARDS"].items()}
AGAIN = "python tools/memory_table.py writes it again"


def page():
    """Configurations, GB of the smallest GPU, and hours of an epoch, by the README's table."""
    for line in (CONFIG.parent / "README.md").read_text().splitlines():
        row = re.fullmatch(r"\| (`.*) \| .* \| (\d+) GB \|(.*)\|", line)
        if row:
            hours = [float(number) for number in re.findall(r"[\d.]+", row[3])]
            yield re.findall(r"`(\w+)`", row[1]), int(row[2]), hours


def test_the_table_is_of_the_present_options():
    assert list(ROWS) == TOOL["row_names"](), AGAIN
    for name, row in ROWS.items():
        options = load(name)
        assert (row.hash, row.settings) == (TOOL["hash_of"](options), settings_of(options)), AGAIN
    assert TOOL["hash_of"](load("t2is", ("seed", "7"))) != ROWS["t2is"].hash


def test_every_suffix_fits_from_the_smallest_gpu_upward():
    smallest = {}
    for names, gigabytes, hours in page():
        smallest |= dict.fromkeys(names, gigabytes)
        assert bool(hours) == (gigabytes == 24)
    assert {name for name in REAL if name != "qwen_editing_no_cfg"} <= smallest.keys()
    smallest["qwen_editing_no_cfg"] = smallest["qwen_editing"]
    for name, row in ROWS.items():
        base, suffix = name[:-5], name[-5:]
        for objective in TOOL["OBJECTIVES"]:
            base = base.removesuffix(objective)
        if suffix in SUFFIXES:
            gigabytes = SUFFIXES[suffix]
            fits = row.gib <= USABLE[gigabytes]
            assert fits == (gigabytes >= smallest[base]), (name, row.gib)


OWN = """
from config.grpo import SUFFIXES, qwen_editing_no_cfg

def mine():
    config = qwen_editing_no_cfg()
    config.pretrained.model = "/models/Qwen-Image-Edit"
    config.dataset = ""
    config.train.reward_fn = {"pickscore": 1.0}
    config.test.reward_fn = {"clipscore": 1.0, "my.rewards:pickscore": 1.0}
    config.train.reward_fn_kwargs = {"pickscore": {"server": "http://there"}}
    config.datasets = {
        "a": {"folder": "a", "reward_fn": {"subfig_clipT": 1.0}, "test_reward_fn": {"pickscore": 1}},
        "b": {"folder": "b", "reward_fn_kwargs": {"reference_clipI": {"dtype": "bfloat16"}},
              "reward_fn": {"reference_clipI": 1.0}},
    }
    return config
"""


def test_a_suffix_works_for_any_function_on_the_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONFIG.parent)
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"```python\n(# my_configs.py.*?)```", page, flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code + OWN)
    for suffix in SUFFIXES:
        of_page = load_options(f"{tmp_path}/mine.py:large_groups{suffix}")
        assert settings_of(of_page) == ROWS[f"t2is{suffix}"].settings
        assert of_page.train.reward_fn_kwargs == load(f"t2is{suffix}").train.reward_fn_kwargs
        settings = settings_of(load_options(f"{tmp_path}/mine.py:mine_nft{suffix}"))
        assert settings == ROWS[f"qwen_editing{suffix}"].settings
    own = load_options(f"{tmp_path}/mine.py:mine_48gb")
    assert own.train.reward_fn_kwargs == {"pickscore": {"server": "http://there"}}
    assert own.test.reward_fn_kwargs == {"clipscore": {"device": "cpu"}}
    assert own.datasets["a"].reward_fn_kwargs == {"subfig_clipT": {"dtype": "float16"}}
    assert own.datasets["b"].reward_fn_kwargs == {"reference_clipI": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("name", "gib", "at_start", "when_full"),
    [
        ("t2is", 23.5, "suffix _24gb", "suffix _24gb"),
        ("t2is_80gb_fast", 44.4, "suffix _48gb", "suffix _48gb"),
        ("t2is_48gb", 79.2, "", "suffix _24gb"),
        ("t2is_24gb", 15.0, "has 24 GB, with the suffix _24gb", ""),
        ("t2is_qwen_24gb", 23.5, "has 48 GB, with the suffix _48gb", ""),
    ],
)
def test_a_gpu_that_is_too_small_is_told_which_suffix_fits(
    monkeypatch, caplog, name, gib, at_start, when_full
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * GIB)
    )
    options = load(name)
    with caplog.at_level(logging.WARNING):
        warn_of_small_gpu(options, torch.device("cuda"))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried")
    full = out_of_memory(options, error)
    for text, expected in ((caplog.text, at_start), (full, when_full)):
        assert expected in text and ("suffix" in text) == bool(expected)
    assert "suffix" not in out_of_memory(dataclasses.replace(options, use_lora=False), error)


def rows_to_compute_again():
    """Those that nearly fill their GPU, and ten others."""
    near, others = [], []
    for name, row in ROWS.items():
        usable = USABLE[row.gpu or 141]
        (near if row.gib > 0.97 * usable else others).append(name)
    return near + random.Random(62).sample(others, 10)


@pytest.mark.long
@pytest.mark.parametrize("name", rows_to_compute_again())
def test_the_table_holds_what_is_estimated(name):
    row = ROWS[name]
    estimated = estimate(load(name), name, 1, USABLE[row.gpu or 141] * GIB)
    needed = (max(estimated.peaks.values()) + RESERVE) / GIB
    assert needed == pytest.approx(row.gib, abs=0.06), AGAIN
    assert max(estimated.peaks, key=estimated.peaks.get) == row.phase
    for names, _, hours in page():
        for base, expected in zip(names, hours, strict=False):
            if name == f"{base}_24gb":
                stated = GPUS["RTX 4090 24GB"][1]
                rate = 1e12 * stated * assumed_share(stated, compiled=False)
                seconds = sum(estimated.epoch.values()) / rate
                assert expected == pytest.approx(seconds / 3600, abs=0.06)
