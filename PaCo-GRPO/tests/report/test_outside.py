"""A run folder that was damaged or edited: a report, or one sentence that names the file."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.report.__main__ import main
from paco_grpo.report.data import ReportError, read_run
from paco_grpo.report.page import write_report

ROW = {"phase": "train", "epoch": 1, "reward/a_mean": 0.5, "reward/a_std": 0.1, "train/loss": 0.1, "time/train_s": 1.0}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run_folder(folder, metrics, config: object = None, pictures=()):
    folder.mkdir(exist_ok=True)
    content = metrics if isinstance(metrics, bytes) else "\n".join(map(json.dumps, metrics)).encode() + b"\n"
    (folder / "metrics.jsonl").write_bytes(content)
    (folder / "config.yaml").write_bytes(config if isinstance(config, bytes) else yaml.safe_dump(config or {}).encode())
    for epoch in range(2 if pictures else 0):
        place = folder / "eval" / f"epoch_{epoch:04d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "eval_data.jsonl").write_text("\n".join(map(json.dumps, pictures)) + "\n")
        Image.new("RGB", (8, 8)).save(place / "a.png")
    return folder


@pytest.mark.parametrize("line", [b"\xff", b"[" * 100_000, b"1" * 5000, b"[1]", b"\0\0", b'{"epoch": 1, "epoch": 2}'])
def test_a_damaged_line_is_named_and_a_cut_last_one_ignored(tmp_path, line):
    good = json.dumps(ROW).encode()
    folder = run_folder(tmp_path / "run", good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(ReportError, match=r"metrics.jsonl, line 2 is ") as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)
    assert read_run(run_folder(folder, b"\xef\xbb\xbf" + good + b"\n" + line)).epochs == 1


@pytest.mark.parametrize("odd", [None, True, "1", [1], 10**400])
def test_a_row_without_an_epoch_is_named(tmp_path, odd):
    with pytest.raises(ReportError, match="metrics.jsonl has a row without an epoch"):
        read_run(run_folder(tmp_path / "run", [ROW, ROW | {"epoch": odd}]))


@pytest.mark.parametrize("config", [b"- 1", b"a: [", b"sample: 3", b"\xff\xfe\0", b"[" * 20_000, b"a: *b"])
def test_a_configuration_that_is_none_is_named(tmp_path, config):
    with pytest.raises(ReportError, match=r"config.yaml ") as caught:
        read_run(run_folder(tmp_path / "run", [ROW], config))
    assert "\n" not in str(caught.value)


def test_a_damaged_picture_and_odd_numbers_of_a_judge_are_named(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [ROW, ROW], {}, [{"file": "a.png", "prompt": "x", "rewards": {"a": 1.0}}])
    picture = folder / "eval" / "epoch_0001" / "a.png"
    picture.write_bytes(picture.read_bytes()[:40])
    assert main([str(folder), "--out", str(tmp_path / "report.html")]) == 1
    assert f"error: image {picture} is not an image that can be read" in capsys.readouterr().err
    (tmp_path / "judge.json").write_text('{"accuracy": "high"}')
    with pytest.raises(ReportError, match="judge.json cannot be used: accuracy is not a number but 'high'"):
        write_report(folder, tmp_path / "report.html", judge=[tmp_path / "judge.json"] * 2)


@FILES
@given(
    st.binary(max_size=60) | st.lists(JSON | st.fixed_dictionaries({name: JSON | st.just(ROW[name]) for name in ROW}), max_size=3),
    st.dictionaries(st.sampled_from(["sample", "train", "seed"]), JSON) | JSON,
    st.lists(st.fixed_dictionaries({"file": st.just("a.png") | JSON, "prompt": JSON, "rewards": JSON, "category": JSON}), max_size=2),
)  # fmt: skip
@example([ROW | {"reward/a_mean": 10**400}], {"sample": {"num_images_per_prompt": "4"}}, [])
def test_any_run_folder_is_read_or_one_error(tmp_path, metrics, config, pictures):
    try:
        run = read_run(run_folder(tmp_path / "run", metrics, config, pictures))
    except ReportError as error:
        assert "\n" not in str(error)
        return
    assert all(len(curve.epoch) == len(curve.value) for curve in [*run.train.values(), *run.diagnostics.values()])
