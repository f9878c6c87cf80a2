"""What a resume finds in the run's folder: damaged files, lost checkpoints, other items, too little
space.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
from tiny_policies import picture
from tiny_run import load_script, rows_of, tiny_edit_options, tiny_options, train, write_edits

from paco_grpo.monitoring.trackers import MetricsFile
from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run
from paco_grpo.training.resume import space_for_checkpoints
from paco_grpo.training.trainer import Trainer


@pytest.fixture
def folder(trained_run, tmp_path):
    """A copy of a run with two checkpoints."""
    shutil.copytree(trained_run.options.dataset, tmp_path / "prompts")
    return shutil.copytree(trained_run.folder, tmp_path / "runs" / "run")


@pytest.fixture
def again(tiny_flux_dir, tmp_path):
    """Options that resume the run in ``folder``."""

    def of(**changes):
        changes = {"resume_from": "latest", "train__learning_rate": 0.05} | changes
        return tiny_options(tiny_flux_dir, tmp_path, **changes)

    return of


@pytest.fixture
def no_weights(monkeypatch):
    """Fail if weights are loaded."""
    monkeypatch.setattr("paco_grpo.training.build.load_generator", lambda *_: pytest.fail("loaded"))


LINE = b'{"epoch": 1, "phase": "train"}\n'
FILES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "nearly_whole": lambda content: content[:-1],
    "list": lambda content: b"[1]\n",
    "number": lambda content: b"7\n",
    "latin": lambda content: b"\xe9" + content,
    "zeros": lambda content: bytes(len(content)),
    "zeros_within": lambda content: content[:40] + bytes(80) + content[120:],
    "binary": lambda content: b"\x93NUMPY\x01\n",
}
ROWS = {
    "half_line": b'{"epoch": 1, "pha\n' + LINE,
    "zeros": bytes(40) + b"\n" + LINE,
    "list": b"[1]\n" + LINE,
    "number": b"7\n",
    "no_phase": b'{"epoch": 1}\n',
    "other_phase": b'{"epoch": 1, "phase": "x"}\n',
    "text_epoch": b'{"epoch": "1", "phase": "train"}\n',
    "latin": b'{"epoch": 1, "phase": "train", "x": "\xe9"}\n',
    "nested": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", [*FILES, "folder"])
@pytest.mark.parametrize("name", ["config.yaml", "plan.json"])
def test_a_damaged_file_is_one_message_before_weights(folder, again, no_weights, name, damage):
    path = folder / name
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(FILES[damage](content))
    with pytest.raises(ConfigError) as caught:
        build_run(again())
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged (") and "\n" not in message
    assert "or delete it: " in message and "resume_changed" not in message


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "metrics.jsonl"])
def test_a_file_that_was_deleted_does_not_hinder(folder, again, caplog, name):
    (folder / name).unlink()
    run = build_run(again())
    run.close()
    assert (folder / name).exists() or name == "metrics.jsonl"
    if name != "plan.json":
        assert name in caplog.text


@pytest.mark.parametrize("damage", ROWS)
def test_damaged_metrics_name_their_line_before_weights(folder, again, no_weights, damage):
    path = folder / "metrics.jsonl"
    path.write_bytes(LINE + ROWS[damage])
    with pytest.raises(
        ConfigError, match=r"metrics\.jsonl is damaged in line 2 .*Remove this line"
    ):
        build_run(again())


def test_metrics_that_are_a_folder_are_one_message(folder, again, no_weights):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        build_run(again())
    with pytest.raises(ConfigError, match="already holds a run"):
        build_run(again(resume_from="None"))


def test_what_a_kill_leaves_in_metrics_is_no_damage(folder):
    metrics = MetricsFile(folder / "metrics.jsonl")
    rows = metrics.rows()
    for end in (b'{"epoch": 3, "pha', bytes(50), b"\n\n"):
        content = metrics.path.read_bytes()
        metrics.path.write_bytes(content + end)
        assert metrics.rows() == rows
        metrics.path.write_bytes(content)


def test_rows_that_are_missing_are_counted(folder, again, caplog):
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    build_run(again()).close()
    assert "lacks 1 of the 2 epochs before the checkpoint, from epoch 1 on" in caplog.text


@pytest.mark.parametrize("lost", ["missing", "a file", "empty"])
def test_lost_checkpoints_are_not_a_new_start(folder, again, no_weights, lost):
    rows = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    if lost == "a file":
        (folder / "checkpoints").write_text("")
    elif lost == "empty":  # save_freq is 1, so the first one was due
        (folder / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has 2 epochs, but .*checkpoints holds no checkpoint"):
        build_run(again())
    assert (folder / "metrics.jsonl").read_bytes() == rows


def test_killed_before_the_first_checkpoint_begins_again_and_says_so(again, caplog):
    """The rows and evaluations of the first course are set aside, not lost."""
    options = again(resume_from="None", save_freq=5, eval_freq=1, num_epochs=3)
    run = build_run(options)
    trainer = Trainer(run)
    trainer.evaluations.evaluate_if_due()
    trainer.epoch()
    run.close()  # as after a kill
    trainer = train(again(save_freq=5, eval_freq=1, num_epochs=3))
    assert "has no checkpoint, starting from the beginning" in caplog.text
    folder = trainer.run.folder
    assert len((folder / "replaced_metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "eval" / "replaced_epoch_0000").is_dir()
    assert [row["epoch"] for row in rows_of(options, "train")] == [1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [{"open": True}, {"criteria": {"Style": {"Line": "Same line."}}}, {"height": 32, "width": 64}],
)
def test_other_metadata_of_the_items_is_refused(folder, again, tmp_path, change):
    path = tmp_path / "prompts" / "train_metadata.jsonl"
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [first | change, *others]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"config.dataset \(.* holds other items\)"):
        build_run(again())
    build_run(again(resume_changed=True)).close()


def test_other_test_items_are_a_warning(folder, again, tmp_path, caplog):
    path = tmp_path / "prompts" / "test_metadata.jsonl"
    path.write_text(path.read_text().replace("odd", "new"))
    build_run(again()).close()
    assert "holds other test items" in caplog.text


def test_other_reference_images_are_refused(tiny_folder, tmp_path):
    model = tiny_folder("flux_kontext")
    train(tiny_edit_options(model, tmp_path, num_epochs=1))
    picture(7, 48, 48).save(tmp_path / "prompts" / "train1.png")
    with pytest.raises(ConfigError, match="holds other items"):
        build_run(tiny_edit_options(model, tmp_path, resume_from="latest"))


def test_another_reference_image_of_as_many_bytes_is_refused(tiny_folder, tmp_path, caplog):
    model = tiny_folder("flux_kontext")
    write_edits(tmp_path / "prompts")
    for name in ("train1", "test1"):
        picture(1, 48, 48).save(tmp_path / "prompts" / f"{name}.png", compress_level=0)
    train(tiny_edit_options(model, tmp_path, num_epochs=1))
    again = tiny_edit_options(model, tmp_path, resume_from="latest")

    picture(7, 48, 48).save(tmp_path / "prompts" / "test1.png", compress_level=0)
    build_run(again).close()
    assert "holds other test items" in caplog.text

    picture(7, 48, 48).save(tmp_path / "prompts" / "train1.png", compress_level=0)
    with pytest.raises(ConfigError, match=r"config.dataset \(.* holds other references\)"):
        build_run(again)


def test_space_is_asked_only_for_what_is_still_to_be_written(tmp_path, again):
    """Bytes of weights, average, moments and two adapters, 24 a weight, for each checkpoint."""

    def checkpoints(epoch, existing, **changes):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for number in range(existing):
            (tmp_path / "run" / "checkpoints" / f"epoch_{number:04d}" / "state").mkdir(parents=True)
        return space_for_checkpoints(again(**changes), tmp_path / "run", 1, epoch) // 24

    many = {"num_epochs": 100, "save_freq": 1, "num_checkpoint_limit": 5}
    assert checkpoints(0, 0, **many) == 6
    assert checkpoints(10, 4, **many) == 2
    assert checkpoints(10, 5, **many) == checkpoints(10, 9, **many) == 1
    assert checkpoints(100, 5, **many) == 0  # only its evaluation is missing
    assert checkpoints(99, 2, **many) == 2
    assert checkpoints(0, 0, num_epochs=100, save_freq=0, num_checkpoint_limit=5) == 1
    assert checkpoints(0, 0, num_epochs=0) == 1


def test_a_full_disk_does_not_hinder_the_last_evaluation(folder, again, monkeypatch):
    """Resumed at its last epoch, a run writes no checkpoint any more."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="MiB free, but checkpoints .*need about"):
        build_run(again(num_epochs=3))
    build_run(again(num_epochs=2)).close()


@pytest.mark.parametrize("option", ["save_dir", "resume_from"])
@pytest.mark.parametrize("place", ["~nouser/x", "x" * 5000])
def test_a_path_that_cannot_be_one_names_its_option(again, capsys, option, place):
    assert load_script("train").train(again(**{option: place}), "toy_t2is") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: config.{option}='") and "cannot be a path" in error
