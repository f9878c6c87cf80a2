"""figures.py draws from results.csv and from the images of evaluations."""

import figures
import study


def test_the_claims_are_drawn_from_the_repository(tmp_path):
    figure = figures.draw_claims(study.read_results())
    labels = [text.get_text() for axes in figure.axes for text in axes.texts]
    groups = [*figures.RESOLUTIONS.values(), *figures.AGGREGATIONS.values()]
    assert labels == [*(label for label, _, _ in groups), "before RL"]
    figure.savefig(tmp_path / "claims.png")
