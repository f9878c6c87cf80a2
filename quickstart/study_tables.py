"""What results.csv says. ``python quickstart/study_tables.py`` prints README's table.

``study.py`` adds the rows, ``study.py STUDY --table`` prints the tables of a study, and
``figures.py`` draws the pictures.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.csv"
KEY = ["study", "run", "seed", "commit", "judge", "torch"]
FROZEN_JUDGE = "11f2c42fa2"
EACH = "each seed's"  # judge, in the study ``mend``
# The others were quickstart's judges of that day in November 2026.
JUDGES = {
    FROZEN_JUDGE: "frozen judge (models/study_judge)",
    "af8055e0d1": "judge of 27 November",
    "b373f6ab16": "judge of 26 November",
    "431f57b519": "judge of 25 November",
    "own": "each quickstart's own",
    EACH: "trained in the study",
}
LABELS = {
    "oracle_w": "w",
    "diversity": "diversity 1 − b",
    "oracle_w_minus_b": "w − b",
    "consistency_after": "consistency, full prompts",
    "consistency_before": "the same before RL",
    "alignment_after": "panels show what is named",
    "darkness_after": "darkness, %",
    "judge_accuracy": "judge on its tests",
    "further_accuracy": "judge on the run's pictures",
    "further_unseen_accuracy": "on what it did not see",
    "cpu_minutes": "CPU minutes",
    "teraflops": "TFLOPs",
    "teraflops_to_half": "TFLOPs to w − b = 0.5",
}
AGREEMENT = ["w", "diversity 1 − b", "w − b"]
# Study -> its run, and the study and run with which it is compared.
COMPARED = {"resolution": ("128px", "objectives", "awm")}
# Runs of the study ``rewards`` in README, and their names there.
FRONT_PAGE = {
    "base": "base model",
    "consistency_nft": "consistency",
    "variety_nft": "**consistency × variety**",
}


def read_results() -> pd.DataFrame:
    """All rows of results.csv."""
    results = pd.read_csv(RESULTS, dtype={"commit": str, "judge": str, "torch": str})
    return results if "torch" in results else results.assign(torch=None)


def add_results(key: dict[str, Any], evaluations: list[dict[str, Any]]) -> None:
    """Adds the rows of a finished run to results.csv."""
    rows = pd.DataFrame(evaluations).assign(**key)
    results = pd.concat([read_results(), rows])
    results.to_csv(RESULTS, index=False, float_format="%.4f")


def trained(results: pd.DataFrame) -> pd.DataFrame:
    """The last row of each run: what the trained model does. ``diversity`` is 1 − b.

    Of the study ``methods``, ``teraflops_to_half`` are those until w − b was first 0.5.
    """
    last = results.drop_duplicates(KEY, keep="last")
    is_half = (results["study"] == "methods") & (results["oracle_w_minus_b"] >= 0.5)
    first = results[is_half].drop_duplicates(KEY).set_index(KEY)["teraflops"]
    last = last.join(first.rename("teraflops_to_half"), on=KEY)
    return last.assign(diversity=1 - last["oracle_b"])


def tables(results: pd.DataFrame, study: str) -> str:
    """What ``study.py STUDY --table`` prints."""
    of_study = results[results["study"] == study]
    if of_study.empty:
        return f"{study}: no finished runs"
    if study == "mend":
        of_study = of_study.assign(judge=EACH)
    parts = [table(of_study)]
    if study == "methods":
        parts.append(by_epoch(of_study))
    if study in COMPARED:
        parts.append(comparison(results, study))
    return "\n\n".join(parts)


def table(results: pd.DataFrame) -> str:
    """Means ± standard errors over the seeds of each run and judge."""
    rows = labeled(trained(results)).dropna(axis=1, how="all")
    columns = pd.Index(LABELS.values()).intersection(rows.columns, sort=False)
    groups = rows.groupby(["run", "judge"], sort=False)
    columns_of_means = {"seed": list} | dict.fromkeys(columns, mean_and_error)
    if LABELS["teraflops_to_half"] in columns:
        columns_of_means[LABELS["teraflops_to_half"]] = values_of_seeds
    return groups.agg(columns_of_means).to_string()


def by_epoch(results: pd.DataFrame) -> str:
    """w, 1 − b and w − b after each number of epochs that has them."""
    rows = results.dropna(subset="oracle_w").astype({"epochs": int})
    groups = labeled(rows.assign(diversity=1 - rows["oracle_b"])).groupby(
        ["run", "judge", "epochs"], sort=False
    )
    return groups.agg(dict.fromkeys(AGREEMENT, mean_and_error)).to_string()


def compared_rows(results: pd.DataFrame, study: str) -> pd.DataFrame:
    """All evaluations of both runs of ``COMPARED``, of the judges and seeds that both have."""
    run, other_study, other_run = COMPARED[study]
    is_first = (results["study"] == other_study) & (results["run"] == other_run)
    is_second = (results["study"] == study) & (results["run"] == run)
    rows = results[is_first | is_second]
    return rows[rows.groupby(["judge", "seed"])["run"].transform("nunique") == 2]


def comparison(results: pd.DataFrame, study: str) -> str:
    """Both runs of ``COMPARED`` on the seeds that both have, and their paired difference."""
    run, _, other_run = COMPARED[study]
    rows = labeled(trained(compared_rows(results, study))).dropna(axis=1, how="all")
    columns = pd.Index(LABELS.values()).intersection(rows.columns, sort=False)
    by_seed = rows.groupby(["run", "judge", "seed"])[list(columns)].mean()
    first = by_seed.loc[other_run]
    second = by_seed.loc[run]
    parts = []
    for judge, of_judge in (first - second).groupby("judge"):
        compared = {
            other_run: first.loc[of_judge.index, of_judge.columns],
            run: second.loc[of_judge.index, of_judge.columns],
            "difference": of_judge,
        }
        cells = {name: values.agg(mean_and_error) for name, values in compared.items()}
        cells["larger in"] = (of_judge > 0).sum()
        seeds = of_judge.index.get_level_values("seed").tolist()
        parts.append(f"{judge}, seeds {seeds}\n{pd.DataFrame(cells).to_string()}")
    return "\n\n".join(parts)


def labeled(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` with the names of columns and judges for readers."""
    return rows.assign(judge=rows["judge"].map(judge_name)).rename(columns=LABELS)


def judge_name(judge: str) -> str:
    """The start of its hash, and in words which it is."""
    return f"{judge} {JUDGES.get(judge, 'another judge')}"


def mean_and_error(values: pd.Series) -> str:
    """Mean ± standard error; nan for one seed."""
    return f"{values.mean():.3f} ± {values.sem():.3f}"


def values_of_seeds(values: pd.Series) -> str:
    """The value of each seed; nan for one that has none."""
    return ", ".join(f"{value:.1f}" for value in values)


def front_page_rows(results: pd.DataFrame) -> pd.DataFrame:
    """The finished runs that README shows: of the frozen judge, once it has all three.

    Until then, of every judge that has the two trainings. ``kept`` is the diversity in percent of
    the mean of the base models.
    """
    rows = trained(results[results["study"] == "rewards"])
    rows = rows[rows["run"].isin(list(FRONT_PAGE))]
    runs_of = rows.groupby("judge", sort=False)["run"].agg(set)
    trainings = FRONT_PAGE.keys() - {"base"}
    judges = [judge for judge, runs in runs_of.items() if trainings <= runs]
    if runs_of.get(FROZEN_JUDGE) == FRONT_PAGE.keys():
        judges = [FROZEN_JUDGE]
    rows = rows[rows["judge"].isin(judges)]
    base = rows.loc[rows["run"] == "base", "diversity"].mean()
    return rows.assign(kept=100 * rows["diversity"] / base)


def front_page(results: pd.DataFrame) -> str:
    """README's table, in Markdown."""
    rows = front_page_rows(results)
    judges = rows["judge"].unique()
    by_run_and_judge = dict(iter(rows.sort_values("seed").groupby(["run", "judge"])))
    lines = [
        "| reward | judge | seeds | panels of an image agree | diversity kept |",
        "|---|---|---|:--:|---|",
    ]
    for (run, name), judge in itertools.product(FRONT_PAGE.items(), judges):
        if (run, judge) not in by_run_and_judge:
            continue
        runs = by_run_and_judge[run, judge]
        seeds = ", ".join(ranges(runs["seed"]))
        agree = f"{runs['oracle_w'].mean():.2f} ± {runs['oracle_w'].sem():.2f}"
        kept = "100 %"
        if run != "base":
            values = runs["kept"]
            spread = f"({values.min():.0f}–{values.max():.0f})"
            kept = f"{values.mean():.0f} ± {values.sem():.0f} % {spread}"
        lines.append(f"| {name} | {judge} | {seeds} | {agree} | {kept} |")
    return "\n".join(lines)


def ranges(seeds: pd.Series) -> list[str]:
    """Ascending seeds, with ``10–12`` for successive ones."""
    parts = []
    for _, run in seeds.groupby(seeds.to_numpy() - np.arange(len(seeds))):
        parts.append(str(run.iloc[0]) if len(run) == 1 else f"{run.iloc[0]}–{run.iloc[-1]}")
    return parts


if __name__ == "__main__":
    print(front_page(read_results()))
