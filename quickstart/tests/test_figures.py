"""figures.py draws from results.csv and from the images of evaluations."""

import figures
import study


def test_the_claims_are_drawn_from_the_repository():
    figure = figures.draw_claims(study.read_results())
    left, right = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert left == [label for label, *_ in figures.RESOLUTIONS.values()]
    assert right[-1] == "before RL"
    assert len(right) == len(figures.AGGREGATIONS) + 1
