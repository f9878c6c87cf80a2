"""figures.py draws from results.csv and from the images of evaluations."""

import pandas as pd
import pytest
from PIL import Image

import figures
import study
import study_tables
from paco_judge.files import write_json_lines


def test_the_claims_are_drawn_from_the_repository():
    left, right = figures.draw_claims(study_tables.read_results()).axes
    assert len(left.containers) == len(figures.RESOLUTIONS)
    assert len(right.containers) == len(figures.AGGREGATIONS)


def test_the_front_page_shows_images_and_runs_of_the_same_judge(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "OUT", tmp_path)
    rows = []
    for judge, seeds in (("j1", (11, 12)), ("j2", (11, 22))):
        for number, run in enumerate(figures.REWARDS):
            for seed in seeds:
                key = dict(zip(study.KEY, ["rewards", run, seed, "c", judge, "2"], strict=True))
                measured = {"oracle_w": seed / 50, "oracle_b": number / 9}
                rows.append(key | measured | {"epochs": 4, "oracle_w_minus_b": 0})
                folder = study.folder_of(key) / "agreement" / "epoch_0004"
                folder.mkdir(parents=True)
                level = 40 * number + seed + 100 * (judge == "j2")
                written = []
                for image in range(8):
                    Image.new("L", (8, 8), level).save(folder / f"{image}.png")
                    prompt = figures.SHOWN_PROMPT if image else "a red square."
                    written.append({"file": f"{image}.png", "prompt": f"2x2 grid: {prompt}"})
                write_json_lines(folder / "eval_data.jsonl", written)
    results = pd.DataFrame(rows).assign(study="rewards", teraflops=None)
    *cells, last = figures.draw_front_page(results).axes
    levels = [cell.get_images()[0].get_array()[0, 0, 0] for cell in cells]
    assert levels == [level for level in (11, 51, 91) for _ in range(figures.SHOWN_IMAGES)]
    assert [line.get_xdata()[0] for line in last.lines if len(line.get_xdata()) == 1][:2] == [1, 1]
    means = [container[0].get_ydata()[0] for container in last.containers]
    assert means == pytest.approx([0.23] * 3)
