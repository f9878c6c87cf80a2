"""study_tables.py: means, paired differences and README's table from rows of results.csv."""

import re

import pandas as pd

import study
import study_tables
from paco_toy.summary import REPO, judge_id

COLUMNS = ["study", "run", "judge", "seed", "oracle_w", "oracle_b", "consistency_after"]


def finished(rows):
    """One row for each run, w − b included."""
    results = pd.DataFrame(rows, columns=COLUMNS).assign(commit="c", torch=None, teraflops=None)
    return results.assign(oracle_w_minus_b=results["oracle_w"] - results["oracle_b"])


def words(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_errors_are_between_seeds_and_of_one_judge():
    rows = [
        ("variety", "j1", "c", 0, -1.0),  # an evaluation on the way
        ("variety", "j1", "c", 0, 0.1),
        ("variety", "j1", "d", 1, 0.3),
        ("gardo", "j1", "c", 0, 0.0),
        ("gardo", "j1", "c", 1, 0.1),
        ("variety", "b373f6ab16", "c", 2, 0.9),
    ]
    results = pd.DataFrame(rows, columns=["run", "judge", "commit", "seed", "oracle_w_minus_b"])
    others = {"study": "rewards", "torch": None, "teraflops": None}
    table = study_tables.table(results.assign(oracle_b=0.25, **others))
    assert words(table)[2:] == [
        "variety j1 another judge [0, 1] 0.750 ± 0.000 0.200 ± 0.100",
        "gardo j1 another judge [0, 1] 0.750 ± 0.000 0.050 ± 0.050",
        "variety b373f6ab16 judge of 26 November [2] 0.750 ± nan 0.900 ± nan",
    ]
    assert "no finished runs" in study_tables.tables(results.assign(**others), "methods")


def test_the_committed_judge_is_the_frozen_one():
    assert judge_id(study.JUDGE) == study_tables.FROZEN_JUDGE


def test_sizes_are_compared_on_the_seeds_and_the_judge_that_both_have():
    results = finished(
        [
            ("objectives", "awm", "j1", 3, 0.8, 0.2, 0.9),
            ("objectives", "awm", "j1", 4, 0.7, 0.3, 0.7),
            ("objectives", "awm", "j1", 5, 0.1, 0.1, 0.1),
            ("objectives", "awm", "j2", 3, 0.2, 0.1, 0.2),
            ("objectives", "nft", "j1", 3, 0.3, 0.1, 0.3),
            ("resolution", "128px", "j1", 3, 0.6, 0.3, 0.5),
            ("resolution", "128px", "j1", 4, 0.6, 0.5, 0.6),
            ("resolution", "128px", "j3", 5, 0.9, 0.1, 0.9),
        ]
    )
    table, compared = study_tables.tables(results, "resolution").split("\n\n")
    assert len(words(table)) == 4
    assert words(compared) == [
        "j1 another judge, seeds [3, 4]",
        "awm 128px difference larger in",
        "w 0.750 ± 0.050 0.600 ± 0.000 0.150 ± 0.050 2",
        "diversity 1 − b 0.750 ± 0.050 0.600 ± 0.100 0.150 ± 0.050 2",
        "w − b 0.500 ± 0.100 0.200 ± 0.100 0.300 ± 0.000 2",
        "consistency, full prompts 0.800 ± 0.100 0.550 ± 0.050 0.250 ± 0.150 2",
    ]


def test_the_front_page_shows_the_frozen_judge_once_it_has_all_runs():
    frozen = study_tables.FROZEN_JUDGE
    earlier = [
        ("rewards", "base", "j0", 0, 0.9, 0.9, 0.9),  # a judge of other studies
        ("rewards", "variety_nft", "j1", 8, 0.75, 0.4, 0.8),
        ("rewards", "base", "j1", 7, 0.5, 0.2, 0.5),
        ("rewards", "consistency_nft", "j1", 9, 0.875, 0.8, 0.8),
        ("rewards", "consistency_nft", "j1", 7, 1.0, 1.0, 0.9),
        ("rewards", "consistency_nft", frozen, 8, 0.9, 0.88, 0.7),
        ("rewards", "variety_nft", frozen, 8, 0.8, 0.6, 0.7),
    ]
    lines = study_tables.front_page(finished(earlier)).splitlines()
    assert lines[2:] == [
        "| base model | j1 | 7 | 0.50 ± nan | 100 % |",
        "| consistency | j1 | 7, 9 | 0.94 ± 0.06 | 12 ± 12 % (0–25) |",
        f"| consistency | {frozen} | 8 | 0.90 ± nan | 15 ± nan % (15–15) |",
        "| **consistency × variety** | j1 | 8 | 0.75 ± nan | 75 ± nan % (75–75) |",
        f"| **consistency × variety** | {frozen} | 8 | 0.80 ± nan | 50 ± nan % (50–50) |",
    ]
    base = ("rewards", "base", frozen, 8, 0.4, 0.5, 0.4)
    lines = study_tables.front_page(finished([*earlier, base])).splitlines()
    assert [line.split(" | ")[1:3] for line in lines[2:]] == [[frozen, "8"]] * 3
    assert lines[-1].endswith("| 80 ± nan % (80–80) |")


def test_successive_seeds_are_written_as_a_range():
    assert study_tables.ranges(pd.Series([3, 10, 11, 12, 22, 23])) == ["3", "10–12", "22–23"]


def test_readme_has_the_table_of_results_csv():
    readme = (REPO / "README.md").read_text()
    (table,) = re.findall(r"^\| reward \|.*?\n\n", readme, re.DOTALL | re.MULTILINE)
    assert table.strip() == study_tables.front_page(study_tables.read_results())
