"""figures.py draws from results.csv and from the images of evaluations."""

from PIL import Image

import figures
import study
from paco_toy.world import write_jsonl


def test_the_claims_are_drawn_from_the_repository(tmp_path):
    figure = figures.draw_claims(study.read_results())
    labels = [text.get_text() for axes in figure.axes for text in axes.texts]
    groups = [*figures.RESOLUTIONS.values(), *figures.AGGREGATIONS.values()]
    assert labels == [*(label for label, _, _ in groups), "before RL"]
    figure.savefig(tmp_path / "claims.png")


def test_the_front_page_shows_images_of_one_open_prompt(tmp_path):
    for run in figures.REWARDS:
        folder = tmp_path / f"{run}-seed{figures.SHOWN_SEED}" / "agreement"
        rows = [{"prompt": "2x2 grid layout depicting a red star.", "file": "other.png"}]
        for number in range(figures.SHOWN_IMAGES):
            rows.append({"prompt": "depicting a striped square.", "file": f"{number}.png"})
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        write_jsonl(folder / "eval_data.jsonl", rows)
    figure = figures.draw_front_page(study.read_results(), tmp_path)
    images = [axes for axes in figure.axes if axes.images]
    assert len(images) == len(figures.REWARDS) * figures.SHOWN_IMAGES
    figure.savefig(tmp_path / "front_page.png")
