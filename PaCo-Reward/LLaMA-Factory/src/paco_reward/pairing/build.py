"""All steps of building a data set: cut, rank, label, clean, split, add reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        sub-figures and edits
  prompt_data.jsonl, sets.jsonl           what was paired; consistency_full_rank.jsonl: the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  stats.json                              numbers
  work/                                   answers of the server: delete to ask again
"""

import hashlib
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.client import JudgeClient
from paco_judge.grid import split_image
from paco_judge.images import encode, load_image
from paco_judge.questions import (
    EDITING,
    Question,
    form_of,
    load_editing_questions,
    load_question,
    record,
)
from paco_reward.datasets import pair_prefix
from paco_reward.errors import PacoRewardError
from paco_reward.options import client_of
from paco_reward.pairing import answers, inputs, select
from paco_reward.pairing.inputs import EditRow, PromptItem
from paco_reward.pairing.select import LabeledPair

EDITING_NAME = "sharegpt_editing"
TRAIN, TEST = "train", "test"
_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}


def build(options: Namespace) -> dict[str, Any]:
    """Build the data set; returns the content of stats.json.

    Problems of options, inputs and server are raised before anything is cut or asked (ValueError, OSError, JudgeError).
    """
    output, folder = options.output, options.grids or options.sub_figures
    question = load_question(options.question, ("theme",))
    editing = load_editing_questions(options.editing_question)
    items = inputs.read_prompts(options.metadata, folder, bool(options.grids)) if folder else []
    by_folder = {item.folder: item for item in items}
    edits = inputs.read_edits(options.editing, bool(options.server)) if options.editing else []
    rankings = inputs.read_rankings(options.rankings, by_folder) if options.rankings else None
    written = inputs.read_reasons(options.reasons_file, by_folder) if options.reasons_file else None
    form = form_of(options, answer_tokens="variants")
    judge = client_of(options, form) if options.server else None
    if judge:
        judge.check()
    _claim(output, items)

    counts: Counter[str] = Counter(
        prompts=len(items), edits=len(edits), sub_figures=_write_sub_figures(items, output)
    )
    questions = {item.folder: question.text(theme=item.grid.theme) for item in items}
    datasets: dict[str, list[LabeledPair]] = {}
    if items:
        _write_lines(
            output / "prompt_data.jsonl",
            ({"idx": item.folder, "prompt": item.prompt} for item in items),
        )
    if items and rankings is None:
        formed = [
            select.candidate_sets(i, options.candidates, options.sets_per_prompt, options.seed)
            for i in items
        ]
        sets = [one for own in formed for one in own]
        counts.update(prompts_without_sets=formed.count([]), sets=len(sets))
        _write_lines(output / "sets.jsonl", (one.model_dump(exclude={"place"}) for one in sets))
        if not options.sets_only:
            rankings = answers.rank_by_scores(sets, questions, output, judge, counts)
    if rankings:
        counts["rankings"] = len(rankings)
        rows = (
            r.model_dump(include={"folder", "ref_image", "comp_images", "rank_images"})
            for r in rankings
        )
        _write_lines(output / "consistency_full_rank.jsonl", rows)
        ranks = options.yes_ranks, options.no_ranks, options.min_gap
        labeled = ((ranking, select.labels_of_ranking(ranking, *ranks)) for ranking in rankings)
        pairs = select.pairs_of_rankings(labeled, by_folder, questions, options.seed, counts)
        decided = {item.group: item.split for item in items if item.split}
        datasets |= _datasets(options, options.name, pairs, counts, judge, decided, written)
    if edits and not options.sets_only:
        pairs, unlabeled = _editing_pairs(edits, output, editing)
        if judge and unlabeled:
            pairs += answers.label_edits(unlabeled, output, judge, options.min_gap, counts)
        datasets |= _datasets(options, EDITING_NAME, pairs, counts, judge, {}, None)

    asked = record((question,) * bool(items) + editing * bool(edits), form)
    counts = Counter({name: value for name, value in counts.items() if value})
    if not (counts["sets"] if options.sets_only else datasets):
        what, lost = (
            "sets" if options.sets_only else "balanced pairs",
            ", ".join(f"{n} {v}" for n, v in counts.items()),
        )
        raise PacoRewardError(
            f"no {what} are left ({lost}); add images or rankings, or loosen the options"
        )
    numbers = _write_datasets(output, datasets, pair_prefix(form))
    stats = {"seed": options.seed, "asked": asked, "counts": dict(counts), "datasets": numbers}
    _write_json(output / "stats.json", stats)
    return stats


def _editing_pairs(
    edits: Sequence[EditRow], output: Path, questions: Sequence[Question]
) -> tuple[list[LabeledPair], list[LabeledPair]]:
    """A pair for each question on each edit: labeled and other ones. Images are copied to OUTPUT by content hash."""

    def stored(file: str) -> str:
        content = Path(file).read_bytes()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        _write(output / (name := f"editing_images/{digest}{Path(file).suffix.lower()}"), content)
        return name

    labeled, others = [], []
    for edit in edits:
        first, second = stored(edit.source), stored(edit.edited)
        for label, kind, question in zip(
            (edit.consistency, edit.follows), EDITING, questions, strict=False
        ):
            text = question.text(instruction=edit.instruction.strip())
            pair = LabeledPair(first, second, text, bool(label), kind, first)
            (others if label is None else labeled).append(pair)
    return labeled, others


def _datasets(
    options: Namespace,
    name: str,
    labeled: Sequence[LabeledPair],
    counts: Counter,
    judge: JudgeClient | None,
    decided: Mapping[str, str],
    written: Mapping[frozenset[str], inputs.ReasonRow] | None,
) -> dict[str, list[LabeledPair]]:
    """Clean, split (some groups are ``decided``), balance and shuffle pairs, and add reasons; by data set name."""
    counts["pairs_labelled"] += len(labeled)
    images = {image for pair in labeled for image in (pair.first, pair.second)}
    leader = select.leaders(images, options.output, options.duplicate_bits)
    kept = select.without_duplicates(select.shuffled(labeled, options.seed), leader, counts)
    if name == EDITING_NAME:  # pairs that share an image, or near-duplicates of one, stay together
        groups = inputs.connected([(leader[pair.first], leader[pair.second]) for pair in kept])
        kept = [
            replace(pair, group=kept[first].first) for pair, first in zip(kept, groups, strict=True)
        ]
    undecided = {pair.group for pair in kept} - set(decided)
    testing = select.groups_for_testing(undecided, options.test_share, options.seed)
    testing |= {group for group, part in decided.items() if part == TEST}

    def split(pairs: Sequence[LabeledPair]) -> dict[str, list[LabeledPair]]:
        parts = {}
        for part in (TRAIN, TEST):
            own = [pair for pair in pairs if (pair.group in testing) == (part == TEST)]
            parts[part] = select.balanced(own, options.seed)
            counts["unbalanced"] += len(own) - len(parts[part])
        return parts

    parts = split(kept)
    if options.reasons or written is not None:
        pairs, name = [*parts[TRAIN], *parts[TEST]], f"{name}_cot"
        if written is not None:
            parts = split(answers.given_reasons(pairs, written, counts))
        else:
            parts = split(answers.write_reasons(pairs, options.output, judge, counts))
    return {f"{name}_{part}": own for part, own in parts.items() if own}


def _claim(output: Path, items: Sequence[PromptItem]) -> None:
    """Record the inputs of the output folder: sub-figures and answers of other ones are never reused."""
    stated = [
        [item.folder, item.prompt, name, file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for item in items
        for name, (file, _) in item.sources.items()
    ]
    digest = hashlib.blake2b(json.dumps(stated).encode(), digest_size=16).hexdigest()
    note = output / "work" / "inputs.txt"
    if note.is_file() and note.read_text() != digest:
        raise PacoRewardError(
            f"{output} was built from other prompts or images; choose another --output, or delete it"
        )
    _write(note, digest)


def _write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Cut or copy to OUTPUT/images/<idx>/ what is not there yet; returns the number of all sub-figures."""

    @lru_cache(maxsize=1)  # the panels of an image follow each other
    def cut(file: Path, rows: int, cols: int) -> list[Image.Image]:
        return split_image(load_image(file), rows, cols)

    for item in items:
        for name, (file, panel) in item.sources.items():
            target = output / "images" / item.folder / name
            if target.exists():
                continue
            grid = item.grid
            try:
                content = (
                    file.read_bytes()
                    if panel is None
                    else encode(cut(file, grid.rows, grid.cols)[panel])
                )
            except ValueError as error:
                raise PacoRewardError(f"{item.place}: {file}: {error}") from error
            _write(target, content)
    return sum(len(item.sources) for item in items)


def _write_datasets(
    output: Path, datasets: Mapping[str, Sequence[LabeledPair]], images: str
) -> dict[str, dict[str, int]]:
    """NAME.json for each data set (ShareGPT), and dataset_info.json; ``images`` stands before each question."""
    info, numbers = {}, {}
    for name, pairs in datasets.items():
        rows = []
        for pair in pairs:
            question = {"role": "user", "content": f"{images}{pair.question}"}
            answer = {"role": "assistant", "content": pair.reason or pair.verdict}
            rows.append({"messages": [question, answer], "images": [pair.first, pair.second]})
        _write_json(output / f"{name}.json", rows)
        columns = {"messages": "messages", "images": "images"}
        info[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": columns,
            "tags": _TAGS,
        }
        yes, groups = sum(pair.label for pair in pairs), {pair.group for pair in pairs}
        numbers[name] = {
            "pairs": len(pairs),
            "yes": yes,
            "no": len(pairs) - yes,
            "groups": len(groups),
        }
    if info:
        _write_json(output / "dataset_info.json", info)
    return numbers


def _write(file: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent, however the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    partial.replace(file)


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    _write(file, "".join(json.dumps(row) + "\n" for row in rows))


def _write_json(file: Path, content: Any) -> None:
    _write(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
