"""The tools that compare two versions of the repository: their parts that need no run."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import golden_cases
import mutants
import survey
from golden_compare import compare_folders


def write_run(folder: Path, step: float = 0.0, seconds: float = 1.0, pixel: int = 0, number: str = "0.5") -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, 2.0 + step])}, folder / "adapter.safetensors")
    row = {"train/loss": 0.25 + step, "time/epoch_s": seconds, "time": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pixels[1, 2] = pixel
    Image.fromarray(pixels).save(folder / "sheet.png")
    (folder / "scores.out").write_text(f"mean of a.png: {number}\n")
    return folder


def test_runs_that_differ_in_times_alone_are_equal(tmp_path):
    assert compare_folders(write_run(tmp_path / "a"), write_run(tmp_path / "b", seconds=9.0)) == []


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        ({"step": 2**-10}, "adapter.safetensors", ["tensor b", "0.000977"]),
        ({"step": 2**-10}, "metrics.jsonl", ["train/loss", "0.000977", "relative 0.00389"]),
        ({"pixel": 7}, "sheet.png", ["6.2%", "7 of 255"]),
        ({"number": "0.6"}, "scores.out", ["0.5 and 0.6"]),
    ],
)
def test_a_planted_difference_is_found_with_its_size(tmp_path, change, file, words):
    lines = compare_folders(write_run(tmp_path / "a"), write_run(tmp_path / "b", **change))
    (line,) = [line for line in lines if line.startswith(file)]
    assert all(word in line for word in words), line


def test_a_missing_file_is_a_difference(tmp_path):
    write_run(tmp_path / "a")
    (write_run(tmp_path / "b") / "sheet.png").unlink()
    assert compare_folders(tmp_path / "a", tmp_path / "b") == ["sheet.png: only in A"]


def test_every_case_is_a_command_with_all_places_known():
    for case in golden_cases.CASES.values():
        for text in case:
            command = golden_cases.command(text, inputs="/in", out="/out", judge="http://judge")
            words = shlex.join(command.argv)
            assert not any(place in words for place in ("{inputs}", "{out}", "{judge}"))
            assert command.processes == (2 if text.startswith("2x ") else 1)


SOURCE = '''
def loss(ratio: float, limit: int = 3):
    """Text with 1 + 1 and a < b."""
    größe = "é" if ratio < 0.5 and not limit else "e"
    logger.info("%d", 1 + limit)
    items.append(größe)
    if limit == 2:
        raise ValueError(1 + 1)
    return ratio * 2
'''


def test_mutants_are_planted_one_at_a_time_and_taken_back(tmp_path):
    found = list(mutants.mutants_of(SOURCE.encode(), "loss.py"))
    assert {mutant.kind for mutant in found} == {"comparison", "boolean", "constant", "removal", "operator", "return"}
    assert not any("1 + limit" in mutant.old or "1 + 1" in mutant.old for mutant in found)
    path = tmp_path / "loss.py"
    path.write_text(SOURCE)
    for mutant in found:
        before = mutants.plant(tmp_path, mutant)
        assert mutant.new in path.read_text() and path.read_text() != SOURCE
        path.write_bytes(before)
        assert path.read_text() == SOURCE


def test_a_mutant_is_the_same_one_after_its_file_moved(tmp_path):
    for side, name in (("base", "old/loss.py"), ("head", "new/terms.py")):
        path = tmp_path / side / "PaCo-GRPO" / "paco_grpo" / name
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE if side == "base" else f"# moved\n{SOURCE}")
    ((here, there),) = mutants.choose(tmp_path / "base", tmp_path / "head", 5, 0, [])
    assert here.key == there.key and there.line == here.line + 1 and there.file.endswith("terms.py")


def test_a_circle_through_a_function_is_found_and_typing_is_none():
    modules = {
        "a": ("import b.c", False),
        "b": ("", True),
        "b.c": ("from . import d", False),
        "b.d": ("def f():\n    from a import x", False),
        "e": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import f", False),
        "f": ("import e", False),
    }
    assert survey.find_circles(survey.import_graph(modules)) == [["a", "b.c", "b.d"]]


def test_sizes_tell_source_from_tests():
    assert [survey.kind_of(name) for name in ("a/b.py", "a/tests/b.py", "conftest.py", "a/README.md", "a.json")] == [
        "source", "tests", "tests", "words", None,
    ]  # fmt: skip
