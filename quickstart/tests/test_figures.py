"""figures.py draws from results.csv and from the images of evaluations."""

import figures
import study


def test_the_claims_are_drawn_from_the_repository():
    left, right = figures.draw_claims(study.read_results()).axes
    assert len(left.containers) == len(figures.RESOLUTIONS)
    assert len(right.containers) == len(figures.AGGREGATIONS)
