"""An editing run keeps its reference images; the contact sheet and the report show them."""

import numpy as np
from PIL import Image
from tiny_run import tiny_edit_options, train

from paco_grpo.evaluation.folder import read_rows
from paco_grpo.report import read_run, write_report


def test_reference_images_are_kept_and_shown(tiny_folder, tmp_path):
    run = train(
        tiny_edit_options(tiny_folder("flux_kontext"), tmp_path, num_epochs=1, eval_freq=1)
    ).run
    folder = run.folder / "eval" / "epoch_0001"
    for number, row in enumerate(read_rows(folder)):
        assert row["reference"] == f"references/{number:05d}.png"
        original = tmp_path / f"prompts/test{row['item_id']}.png"
        with Image.open(folder / row["reference"]) as kept, Image.open(original) as given:
            assert (
                np.asarray(kept) == np.asarray(given.convert("RGB"))
            ).all()  # small ones are kept as they are
    write_report(read_run(run.folder), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figcaption>reference</figcaption>") == 5
