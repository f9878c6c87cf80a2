"""figures.py draws from results.csv and from the images of evaluations."""

import pytest

import figures
import study


def test_the_claims_are_drawn_from_the_repository():
    results = study.read_results()
    figure = figures.draw_claims(results)
    rows = study.trained(results[results["study"] == "aggregation"])
    of_run = rows[rows["run"] == next(iter(figures.AGGREGATIONS))]
    errors = of_run[["alignment_after", "darkness_after"]].sem()
    _, _, bars = figure.axes[1].containers[0].lines
    for axis, (bar, error) in enumerate(zip(bars, errors, strict=True)):
        ((start, end),) = bar.get_segments()
        assert end[axis] - start[axis] == pytest.approx(2 * error)
