"""benchmarks/check_gpu.py on the CPU, and with checks that fail."""

import json
import time

import pytest
import torch

import check_gpu


def test_the_toy_epoch_and_its_row(tmp_path, monkeypatch, capsys):
    first, *_ = check_gpu.plan(tmp_path, gpus=0)
    patient = (first[0], 500, first[2])
    monkeypatch.setattr(check_gpu, "plan", lambda *_: [patient])
    output = tmp_path / "check.json"
    assert check_gpu.main(["--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["results"]
    assert (row["name"], row["status"], row["deviation"]) == ("toy, float32", "passed", 0.0)
    assert capsys.readouterr().out.count("deviation 0") == 2  # when it ends, and in the table


@pytest.mark.long
@pytest.mark.parametrize("model", check_gpu.FAMILIES)
def test_gradients_at_full_width(model):
    # Bfloat16 takes minutes on a CPU without instructions for it.
    gradients = check_gpu.gradients(model, "cpu", "float32")
    assert gradients.isfinite().all()
    assert gradients.count_nonzero() > 0.4 * len(gradients)  # A waits for B


def test_a_small_difference_deviates():
    reference = torch.ones(100)
    assert check_gpu.compared(reference * 1.001, reference, 0.01)["deviation"] < 0.002
    for values in (reference * 1.02, reference * 0, reference * float("nan")):
        with pytest.raises(check_gpu.Deviates):
            check_gpu.compared(values, reference, 0.01)


def test_a_failure_is_a_row_and_the_minutes_are_kept():
    def fail():
        raise ValueError("wrong\nnumbers")

    later = time.monotonic() + 100
    row = check_gpu.run_check(("fails", 20, fail), later)
    assert (row["status"], row["message"]) == ("failed", "ValueError: wrong numbers")
    row = check_gpu.run_check(("slow", 10, lambda: time.sleep(20)), later)
    assert row["status"] == "failed" and row["seconds"] < 19
    assert check_gpu.run_check(("late", 20, fail), time.monotonic() + 1)["status"] == "skipped"
    row = check_gpu.run_check(("good", 20, lambda: {"images": 3}), later)
    assert check_gpu.line(row).endswith("3")
