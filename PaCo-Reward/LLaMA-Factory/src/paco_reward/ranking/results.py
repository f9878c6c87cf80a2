"""What people's answers become: the files of build-dataset, and a benchmark of their own eye."""

import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paco_judge.files import read_json, read_json_lines, write_json, write_json_lines
from paco_reward.pairing.files import TEST, write_image
from paco_reward.ranking import agreement, people
from paco_reward.ranking.tasks import (
    EDIT,
    EDIT_LABELS,
    PAIR,
    PICTURES,
    SET,
    Task,
    has_pictures,
    has_set,
    read_themes,
)

RANKINGS = "rankings.jsonl"
PAIRS = "pairs.jsonl"
EDITS = "editing.jsonl"
FILES = {SET: RANKINGS, PAIR: PAIRS, EDIT: EDITS}
BENCHMARK = "benchmark"

logger = logging.getLogger(__name__)

# By task: the columns of its result, and the answers of all people that did not skip it.
Given = dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]]


def write_results(output: Path, tasks: Sequence[Task], sets: Path | None) -> dict[str, Any]:
    """Write all files from all answers; each is whole at any time.

    Args:
        output: Its ``answers`` are read. Answers of an earlier call, to what is not asked any
            more, count as well, unless the pictures are gone or others now: their names would
            give them the labels of those before.
        tasks: What is asked; their columns count before those that answers have.
        sets: The folder of the sets, for the benchmark.

    Returns:
        What agreement.json holds.
    """
    everyone = people.read_all(output)
    given: dict[str, Given] = {SET: {}, PAIR: {}, EDIT: {}}
    columns = {task.key: task.row for task in tasks}
    for answers in everyone.values():
        for (task, again), row in answers.items():
            if not again and row["answer"] is not None:
                start = (columns.get(task, row["row"]), [])
                given[row["kind"]].setdefault(task, start)[1].append(row["answer"])
    if sets is not None:
        themes = read_themes(sets)
        for task in given[SET].keys() - columns.keys():
            set_columns, _ = given[SET][task]
            if not has_set(sets, themes, task, set_columns):
                logger.warning("%s: a set of %s is no longer there", sets, set_columns["folder"])
                del given[SET][task]
    for kind, names in PICTURES.items():
        for task in given[kind].keys() - columns.keys():
            of_task, _ = given[kind][task]
            if not has_pictures(output, kind, task, of_task):
                shown = " and ".join(of_task[name] for name in names)
                logger.warning("%s: a %s of %s is no longer there", output, kind, shown)
                del given[kind][task]
    rows = {SET: _rankings(given[SET]), PAIR: _pairs(given[PAIR]), EDIT: _edits(given[EDIT])}
    for kind, of_kind in rows.items():
        file = output / FILES[kind]
        if of_kind or file.exists():
            write_json_lines(file, of_kind)
    found = agreement.measure(everyone)
    for kind, by_task in given.items():
        found["between_people"][kind]["answered"] = len(by_task)
    write_json(output / "agreement.json", found)
    if sets is not None:
        write_benchmark(output / BENCHMARK, tasks, given[SET], sets)
    return found


def _rankings(given: Given) -> list[dict[str, Any]]:
    """A row for each person's answer: where they differ, build-dataset takes the majority."""
    rows = []
    for columns, answers in given.values():
        for answer in answers:
            rows.append(dict(columns) | answer)
    return rows


def _pairs(given: Given) -> list[dict[str, Any]]:
    rows = []
    for columns, answers in given.values():
        label = majority(answers, "label")
        if label is None:
            continue
        row = dict(columns) | {"label": label}
        for answer in answers:
            if answer["label"] == label and answer.get("reason"):
                row.setdefault("reason", answer["reason"])
        rows.append(row)
    return rows


def _edits(given: Given) -> list[dict[str, Any]]:
    rows = []
    for columns, answers in given.values():
        stated = {}
        for name in EDIT_LABELS:
            label = majority(answers, name)
            if label is not None:
                stated[name] = label
        if stated:
            rows.append(dict(columns) | stated)
    return rows


def majority(answers: Sequence[Mapping[str, Any]], label: str) -> str | None:
    """Yes or No, whichever more people say; None: as many say the other, or nobody says any."""
    votes = Counter(answer[label] for answer in answers if answer.get(label))
    if votes["Yes"] == votes["No"]:
        return None
    return "Yes" if votes["Yes"] > votes["No"] else "No"


def mean_ranking(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """All people's order of a set by mean rank; of those with an equal one, only the first."""
    ranked = [agreement.ranks(answer) for answer in answers]
    by_mean: dict[float, str] = {}
    for name in sorted(ranked[0]):
        mean = float(np.mean([person[name] for person in ranked]))
        by_mean.setdefault(round(mean, 6), name)
    return [name for _, name in sorted(by_mean.items())]


def write_benchmark(folder: Path, tasks: Sequence[Task], given: Given, sets: Path) -> None:
    """The ranked sets of TEST in ConsistencyRank-Bench's format, with their pictures.

    No theme of TRAIN is in it. Of candidates that are equal to people one is kept, so that the
    order is true.
    """
    rows = []
    folders = set()
    for task in tasks:
        if task.part != TEST or task.key not in given:
            continue
        ranked = mean_ranking(given[task.key][1])
        if len(ranked) < 2:
            continue
        listed = [name for name in task.row["comp_images"] if name in ranked]
        place = {"folder": task.row["folder"], "ref_image": task.row["ref_image"]}
        rows.append(place | {"comp_images": listed, "rank_images": ranked})
        folders.add(task.row["folder"])
        for name in (task.row["ref_image"], *listed):
            picture = Path("images", task.row["folder"], name)
            write_image(folder / picture, (sets / picture).read_bytes())
    ranks_file = folder / "consistency_full_rank.jsonl"
    if not rows and not ranks_file.exists():
        return
    prompts = [row for row in read_json_lines(sets / "prompt_data.jsonl") if row["idx"] in folders]
    write_json_lines(folder / "prompt_data.jsonl", prompts)
    write_json_lines(ranks_file, rows)


def commands(output: Path, sets: Path | None) -> list[str]:
    """What to run next: build-dataset for each of the files, and the benchmark."""
    output = output.resolve()
    lines = []
    if sets is not None and (output / RANKINGS).exists():
        made_from = read_json(sets / "sets.json")
        lines.append(
            _build(
                grids=made_from["grids"],
                metadata=made_from["metadata"],
                output=sets.resolve(),
                rankings=output / RANKINGS,
            )
        )
    data = output / "dataset"
    for name, option in ((PAIRS, "pairs"), (EDITS, "editing")):
        file = output / name
        if not file.exists():
            continue
        if any("chosen_by" in row for row in read_json_lines(file)):  # of `paco-reward suspects`
            lines.append(_build(mend=file, output="DATA_OF_THE_JUDGE", beside="ITS_TRAINING_SET"))
        elif option == "pairs":
            lines.append(_build(pairs=file, output=data, name="people_pairs"))
        else:
            lines.append(_build(editing=file, output=data))
    if (output / BENCHMARK).exists():
        place = shlex.quote(str(output / BENCHMARK))
        lines.append(f"python eval_vllm.py --dataset_dir {place} --question theme --model JUDGE")
    return lines


def _build(**options: object) -> str:
    words = ["paco-reward", "build-dataset"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)
