"""Rewards by name and import path; a mistake names the nearest known name."""

import math
import re
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import reward_factories
from PIL import Image
from reward_factories import checked

from paco_grpo.data.prompts import load_prompts
from paco_grpo.rewards.registry import (
    build_rewards,
    find_problems,
)
from paco_grpo.types import Item
from paco_judge.errors import UserError

IMAGES = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
ITEMS = [Item(0, "a"), Item(1, "b")]
OWN, JPEG = "reward_factories:factory", "jpeg_compressibility"
JUDGE = "consistency_score"


def test_import_path_kwargs_and_device():
    ((name, reward),) = build_rewards({OWN: 2.0}, {OWN: {"scale": 3.0}}, device="cpu").items()
    assert (
        name == "factory"
        and reward(IMAGES, ITEMS).tolist() == [3.0, 3.0]
        and reward.function.device == "cpu"
    )
    reward.check_items(ITEMS)  # a factory need not check them


@pytest.mark.parametrize(
    ("reward_fn", "kwargs", "named"),
    [
        ({JPEG: 1}, {JPEG: {"qualty": 3}}, f"'{JPEG}'.*'qualty'.*{JPEG}.quality"),
        ({JUDGE: 1}, {JUDGE: {"prompt_template_version": 2}}, f"'prompt_.*{JUDGE}.*question"),
        ({"jpeg_compresibility": 1}, {}, f"'{JPEG}'"),
        ({OWN: 1, "other:factory": 1}, {}, "'factory'"),
        ({JPEG: 1}, {JPEG: {"server": "http://x", "quality": 3}}, "'quality'"),
        ({"nowhere.py:factory": 1}, {}, "'nowhere.py:factory'"),
    ],
)
def test_mistakes_name_what_is_right(reward_fn, kwargs, named):
    with pytest.raises(UserError, match=named):
        build_rewards(reward_fn, kwargs)


def test_factories_in_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def two(x=2): return lambda images, items: [x] * len(items)\n"
        "def bare(images, items): return [4] * len(items)\n"
    )
    served = tmp_path / "served.py"
    served.write_text("import nowhere_installed")
    rewards = build_rewards({f"{file}:two": 1}, {f"{file}:two": {"x": 3}})
    assert rewards["two"](IMAGES, ITEMS).tolist() == [3, 3]
    with pytest.raises(UserError, match="mine.py:bare.* factory"):
        build_rewards({f"{file}:bare": 1})
    with pytest.raises(UserError, match="nowhere_installed"):
        build_rewards({f"{served}:x": 1})
    # Its packages are in the environment of the service alone.
    (reward,) = build_rewards({f"{served}:x": 1}, {f"{served}:x": {"server": "http://a"}}).values()
    assert (reward.function.name, reward.function.server) == (f"{served}:x", "http://a")


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("def bright(): pass", "None"),
        ("def bright(): return lambda images: 5", "images and items"),
        ("bright = 0.5", "no function, but 0.5"),
        ("\n\nbright = brihgt", "NameError: name 'brihgt'.*UP.PY, line 3"),
        ("\ndef bright(:", "SyntaxError.*UP.PY, line 2"),
        ("import sys\n\n\nsys.exit(3)", "SystemExit: 3.*UP.PY, line 4"),
        ("import sys\ndef bright():\n sys.exit(5)", r"sys.exit\(5\)"),
        ("def bright(): return lambda images, items: [5] * len(items)", None),
    ],
)
def test_code_that_gives_no_reward_is_refused_at_the_start(tmp_path, monkeypatch, code, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "UP.PY").write_text(code)
    name = "~/UP.PY:bright"
    if named is None:
        assert build_rewards({name: 1})["bright"](IMAGES, ITEMS).tolist() == [5, 5]
        return
    with pytest.raises(UserError, match=f"(?s)'{name}'.*{named}"):
        build_rewards({name: 1})


NO_TEXT = Item(7, "a fox")
GRID = Item(8, '1x2 grid of "one" cat. [LEFT]: a. [RIGHT]: b.', references=(IMAGES[0],))


@pytest.mark.parametrize(
    ("name", "kwargs", "bad"),
    [
        ("ocr", {"server": "http://127.0.0.1:9"}, NO_TEXT),
        ("consistency_score", {"question": "criteria"}, GRID),
        ("consistency_for_editing", {}, NO_TEXT),
        (
            "edit_score",
            {"server": "http://127.0.0.1:9"},
            Item(9, "two", references=(IMAGES[0], IMAGES[0])),
        ),
    ],
)
def test_items_that_cannot_be_scored_are_found(name, kwargs, bad):
    (reward,) = build_rewards({name: 1}, {name: kwargs}).values()
    with pytest.raises(UserError, match=f"{re.escape(repr(bad.prompt))} .*{name}"):
        reward.check_items([bad] if bad is GRID else [GRID, bad])


def test_items_are_checked_before_anything_is_loaded(monkeypatch):
    calls = []

    def recording():
        score = lambda images, items: calls.append("called")
        score.check = lambda: calls.append("check")
        score.prove = lambda items: calls.append(("prove", len(items)))
        return score

    recording.check_item = lambda item, kwargs: calls.append(item.item_id)
    recording.remark = lambda item: calls.append(f"remark {item.item_id}")
    monkeypatch.setattr(reward_factories, "factory", recording)
    assert find_problems(build_rewards({OWN: 1}).values(), ITEMS) == []
    assert calls == [0, 1, "check", "remark 0", "remark 1", ("prove", 2)]


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ([0.5], "shape"),
        ([[0.5], [0.7]], "shape"),
        ([0.5, math.inf], "inf for 1 of 2 images"),
        ([-math.inf, None], "-inf"),
    ],
)
def test_what_is_not_one_number_for_each_image_is_refused(result, named):
    with pytest.raises(UserError, match=f"'wrong'.* {named}"):
        checked(lambda images, items: result)(IMAGES, ITEMS)


@pytest.mark.parametrize(
    ("result", "scores"),
    [
        ([True, False], [1, 0]),
        ([0.5, None], [0.5, np.nan]),
    ],
)
def test_numbers_of_any_kind_are_scores_and_none_is_missing(result, scores):
    np.testing.assert_array_equal(checked(lambda *_: result)(IMAGES, ITEMS), scores)


def test_all_rewards_that_cannot_be_used_are_named():
    broken = Mock()
    broken.check.side_effect = OSError("no file")
    rewards = build_rewards({"jpeg_compressibility": 1.0, "ocr": 1.0}).values()
    unusable, quoted = find_problems([checked(broken), *rewards], ITEMS)
    assert "no file" in unusable and "reward_fn_kwargs.reward_factories:wrong" in unusable
    assert "item 'a' " in quoted and "'ocr'" in quoted


def test_an_item_that_cannot_be_scored_is_named_by_file_and_line(tmp_path):
    """Where others can, a set of their own is the cure."""
    (tmp_path / "test.txt").write_text('a "cat"\n\na fox\na "dog"\n')
    items = load_prompts(tmp_path, "test", "text")
    place = re.escape(f"{tmp_path / 'test.txt'}:3 ")
    reward = build_rewards({"ocr": 1.0})["ocr"]
    with pytest.raises(UserError, match=f"^{place}.*'ocr'.* 1 of 3 .*config.datasets"):
        reward.check_items(items)
    with pytest.raises(UserError) as caught:
        reward.check_items(items[1:2])
    assert "config.datasets" not in str(caught.value)
    named = "reward_factories:needs_scene"
    reward = build_rewards({named: 1.0})["needs_scene"]
    with pytest.raises(UserError, match=f"^{place}.*no field 'scene', which {named} needs"):
        reward.check_items(items[1:2])


def test_a_reward_is_its_weights(tmp_path, monkeypatch):
    """Those that its arguments name, and those of its defaults; a path alone is not a difference."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub" / "models--openai--clip-vit-large-patch14" / "snapshots"
    (snapshots / "4f4f").mkdir(parents=True)
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("4f4f")
    told = {}
    for name in ("first", "second", "third"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_text("other" if name == "third" else "weights")
        kwargs = {"clipscore": {"model": str(folder), "scale": 20.0}}
        told[name] = build_rewards({"clipscore": 1.0}, kwargs)["clipscore"].identity()
    assert told["first"] == told["second"] != told["third"]
    default = build_rewards({"clipscore": 1.0})["clipscore"]
    assert "openai/clip-vit-large-patch14@4f4f" in default.weights()
    absent = build_rewards({"clipscore": 1.0}, {"clipscore": {"model": "org/absent"}})
    assert absent["clipscore"].weights() is None
    said = "reward_factories:said"
    for text in (5000 * "x", "~nobody knows", "a\0"):
        (reward,) = build_rewards({said: 1.0}, {said: {"value": text}}).values()
        assert reward.identity()["arguments"] == {"value": text}
