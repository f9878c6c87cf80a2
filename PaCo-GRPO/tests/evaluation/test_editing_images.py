"""An editing run keeps its reference images; the contact sheet and the report show them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_run import tiny_edit_options, train

from paco_grpo.report import write_report


def pixels(image):
    return np.asarray(image.convert("RGB"), dtype=np.int16)


def test_reference_images_are_kept_and_shown(tiny_folder, tmp_path):
    options = tiny_edit_options("toy_kontext", tiny_folder("flux_kontext"), tmp_path, num_epochs="1", eval_freq="1")
    train(options)
    run_dir = Path(options.save_dir) / options.run_name
    folder = run_dir / "eval" / "epoch_0001"
    rows = [json.loads(line) for line in (folder / "eval_data.jsonl").read_text().splitlines()]
    assert [row["reference"] for row in rows] == [f"references/{i:05d}.png" for i in range(5)]
    for row in rows:
        given = run_dir.parents[1] / "prompts" / f"test{row['item_id']}.png"
        with Image.open(folder / row["reference"]) as kept, Image.open(given) as original:
            assert (pixels(kept) == pixels(original)).all()  # small ones are kept as they are
    with Image.open(folder / "sheet.png") as sheet:  # 5 pairs in 2 columns
        assert sheet.size == (2 * (2 * 164 + 8), 3 * (164 + 14))
    page = write_report(run_dir, tmp_path / "report.html")[0].read_text()
    assert page.count("<article>") == 5 and page.count("<figure>") == 15 and page.count("<b>reference</b>") == 5
