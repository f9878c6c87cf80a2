"""All steps of building a data set: cut, rank, label, clean, split, add reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        sub-figures and edits
  prompt_data.jsonl, sets.jsonl           what was paired
  consistency_full_rank.jsonl             the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  stats.json                              numbers
  work/                                   answers of the server: delete to ask again
"""

import hashlib
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    RequestForm,
    form_of,
    load_editing_questions,
    load_question,
    record,
)
from paco_reward.datasets import pair_prefix
from paco_reward.errors import PacoRewardError
from paco_reward.options import client_of
from paco_reward.pairing import answers, inputs, select
from paco_reward.pairing.inputs import EditRow, PromptItem, Ranking, ReasonRow
from paco_reward.pairing.select import LabeledPair

EDITING_NAME = "sharegpt_editing"
TRAIN, TEST = "train", "test"
_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}

Parts = dict[str, list[LabeledPair]]  # the pairs of TRAIN and of TEST


@dataclass(frozen=True)
class Inputs:
    """What the options name, read and checked."""

    items: list[PromptItem]
    edits: list[EditRow]
    rankings: list[Ranking] | None  # by people
    reasons: dict[frozenset[str], ReasonRow] | None  # written by people
    question: Question
    editing_questions: tuple[Question, ...]
    form: RequestForm
    judge: JudgeClient | None

    def theme_questions(self) -> dict[str, str]:
        """What is asked about sub-figures, by prompt."""
        return {item.folder: self.question.text(theme=item.grid.theme) for item in self.items}


def build(options: Namespace) -> dict[str, Any]:
    """Build the data set; returns the content of stats.json.

    Problems of options, inputs and server are raised before anything is cut or asked (ValueError,
    OSError, JudgeError).
    """
    read = read_inputs(options)
    _claim(options.output, read.items)
    counts: Counter[str] = Counter(prompts=len(read.items), edits=len(read.edits))
    counts["sub_figures"] = _write_sub_figures(read.items, options.output)
    datasets: Parts = {}
    if read.items:
        datasets |= theme_datasets(options, read, counts)
    if read.edits and not options.sets_only:
        datasets |= editing_datasets(options, read, counts)
    counts = Counter({name: count for name, count in counts.items() if count})
    if options.sets_only and not counts["sets"]:
        raise PacoRewardError(_nothing_left("sets", counts))
    if not options.sets_only and not datasets:
        raise PacoRewardError(_nothing_left("balanced pairs", counts))
    stats = {
        "seed": options.seed,
        "asked": _record(options, read),
        "counts": dict(counts),
        "datasets": _write_datasets(options.output, datasets, pair_prefix(read.form)),
    }
    _write_json(options.output / "stats.json", stats)
    return stats


def read_inputs(options: Namespace) -> Inputs:
    """Read all files, and ask the server for its model. Raises ValueError, OSError, JudgeError."""
    form = form_of(options, answer_tokens="variants")
    question = load_question(options.question, ("theme",))
    editing_questions = load_editing_questions(options.editing_question)
    items = []
    if folder := options.grids or options.sub_figures:
        items = inputs.read_prompts(options.metadata, folder, bool(options.grids))
    by_folder = {item.folder: item for item in items}
    edits = []
    if options.editing:
        edits = inputs.read_edits(options.editing, bool(options.server))
    rankings = None
    if options.rankings:
        rankings = inputs.read_rankings(options.rankings, by_folder)
    reasons = None
    if options.reasons_file:
        reasons = inputs.read_reasons(options.reasons_file, by_folder)
    judge = None
    if options.server:
        judge = client_of(options, form)
        judge.check()
    return Inputs(items, edits, rankings, reasons, question, editing_questions, form, judge)


def theme_datasets(options: Namespace, read: Inputs, counts: Counter) -> Parts:
    """Data sets of sub-figures: sets, rankings, labels.

    Empty if only sets for people are wanted.
    """
    prompts = [{"idx": item.folder, "prompt": item.prompt} for item in read.items]
    _write_lines(options.output / "prompt_data.jsonl", prompts)
    rankings = read.rankings
    if rankings is None:
        sets = _candidate_sets(options, read.items, counts)
        if options.sets_only:
            return {}
        questions = read.theme_questions()
        rankings = answers.rank_by_scores(sets, questions, options.output, read.judge, counts)
    if not rankings:
        return {}
    counts["rankings"] = len(rankings)
    pairs = theme_pairs(options, read, rankings, counts)
    kept, _ = clean(pairs, options, counts)
    decided = {item.group: item.split for item in read.items if item.split}
    testing = groups_for_testing(kept, decided, options)
    parts = split(kept, testing, options.seed, counts)
    name = options.name
    if options.reasons or read.reasons is not None:
        pairs = with_reasons([*parts[TRAIN], *parts[TEST]], options, read, counts)
        parts = split(pairs, testing, options.seed, counts)
        name = f"{name}_cot"
    return _named(name, parts)


def editing_datasets(options: Namespace, read: Inputs, counts: Counter) -> Parts:
    """Data sets of edits with their labels, or a judge's."""
    pairs, unlabeled = _editing_pairs(read.edits, options.output, read.editing_questions)
    if read.judge and unlabeled:
        pairs += answers.label_edits(unlabeled, options.output, read.judge, options.min_gap, counts)
    kept, leader = clean(pairs, options, counts)
    # Pairs that share an image, or near-duplicates of one, stay on one side of the split.
    groups = inputs.connected([(leader[pair.first], leader[pair.second]) for pair in kept])
    kept = [
        replace(pair, group=kept[first].first) for pair, first in zip(kept, groups, strict=True)
    ]
    testing = groups_for_testing(kept, {}, options)
    parts = split(kept, testing, options.seed, counts)
    name = EDITING_NAME
    if options.reasons:
        pairs = with_reasons([*parts[TRAIN], *parts[TEST]], options, read, counts)
        parts = split(pairs, testing, options.seed, counts)
        name = f"{name}_cot"
    return _named(name, parts)


def _candidate_sets(
    options: Namespace, items: Sequence[PromptItem], counts: Counter
) -> list[inputs.CandidateSet]:
    sets = []
    for item in items:
        of_prompt = select.candidate_sets(
            item, options.candidates, options.sets_per_prompt, options.seed
        )
        counts["prompts_without_sets"] += not of_prompt
        sets += of_prompt
    counts["sets"] = len(sets)
    rows = [candidates.model_dump(exclude={"place"}) for candidates in sets]
    _write_lines(options.output / "sets.jsonl", rows)
    return sets


def theme_pairs(
    options: Namespace, read: Inputs, rankings: Sequence[Ranking], counts: Counter
) -> list[LabeledPair]:
    """The labeled pairs of rankings, which are written to OUTPUT."""
    fields = {"folder", "ref_image", "comp_images", "rank_images"}
    rows = [ranking.model_dump(include=fields) for ranking in rankings]
    _write_lines(options.output / "consistency_full_rank.jsonl", rows)
    labeled = []
    for ranking in rankings:
        labels = select.labels_of_ranking(
            ranking, options.yes_ranks, options.no_ranks, options.min_gap
        )
        labeled.append((ranking, labels))
    by_folder = {item.folder: item for item in read.items}
    questions = read.theme_questions()
    return select.pairs_of_rankings(labeled, by_folder, questions, options.seed, counts)


def clean(
    labeled: Sequence[LabeledPair], options: Namespace, counts: Counter
) -> tuple[list[LabeledPair], dict[str, str]]:
    """The shuffled pairs without near-duplicates, and ``select.leaders`` of their images."""
    counts["pairs_labelled"] += len(labeled)
    images = {image for pair in labeled for image in (pair.first, pair.second)}
    leader = select.leaders(images, options.output, options.duplicate_bits)
    shuffled = select.shuffled(labeled, options.seed)
    return select.without_duplicates(shuffled, leader, counts), leader


def groups_for_testing(
    pairs: Sequence[LabeledPair], decided: Mapping[str, str], options: Namespace
) -> set[str]:
    """Groups for testing: those ``decided`` by the metadata, and a share of the rest."""
    undecided = {pair.group for pair in pairs} - set(decided)
    testing = select.groups_for_testing(undecided, options.test_share, options.seed)
    return testing | {group for group, part in decided.items() if part == TEST}


def split(pairs: Sequence[LabeledPair], testing: set[str], seed: int, counts: Counter) -> Parts:
    """The pairs of TRAIN and of TEST, as many Yes as No of each kind."""
    parts: Parts = {}
    for part in (TRAIN, TEST):
        of_part = [pair for pair in pairs if (pair.group in testing) == (part == TEST)]
        parts[part] = select.balanced(of_part, seed)
        counts["unbalanced"] += len(of_part) - len(parts[part])
    return parts


def with_reasons(
    pairs: Sequence[LabeledPair], options: Namespace, read: Inputs, counts: Counter
) -> list[LabeledPair]:
    """The pairs with a reason that agrees with their label, by people or by the judge."""
    if read.reasons is not None:
        return answers.given_reasons(pairs, read.reasons, counts)
    return answers.write_reasons(pairs, options.output, read.judge, counts)


def _named(name: str, parts: Parts) -> Parts:
    return {f"{name}_{part}": pairs for part, pairs in parts.items() if pairs}


def _record(options: Namespace, read: Inputs) -> dict[str, Any]:
    """The questions that labels and reasons are answers to."""
    questions: tuple[Question, ...] = ()
    if read.items:
        questions += (read.question,)
    if read.edits:
        questions += read.editing_questions
    if options.reasons:
        questions += (load_question(answers.REASON),)
    return record(questions, read.form)


def _nothing_left(what: str, counts: Mapping[str, int]) -> str:
    lost = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"no {what} are left ({lost}); add images or rankings, or loosen the options"


def _editing_pairs(
    edits: Sequence[EditRow], output: Path, questions: Sequence[Question]
) -> tuple[list[LabeledPair], list[LabeledPair]]:
    """A pair for each question on each edit: labeled and other ones.

    Images are copied to OUTPUT by content hash.
    """
    labeled = []
    unlabeled = []
    for edit in edits:
        first = _stored(Path(edit.source), output)
        second = _stored(Path(edit.edited), output)
        labels = (edit.consistency, edit.follows)
        for label, kind, question in zip(labels, EDITING, questions, strict=False):
            text = question.text(instruction=edit.instruction.strip())
            pair = LabeledPair(first, second, text, bool(label), kind, first)
            if label is None:
                unlabeled.append(pair)
            else:
                labeled.append(pair)
    return labeled, unlabeled


def _stored(file: Path, output: Path) -> str:
    """The name of a copy of an edit's image in OUTPUT."""
    content = file.read_bytes()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    name = f"editing_images/{digest}{file.suffix.lower()}"
    _write(output / name, content)
    return name


def _claim(output: Path, items: Sequence[PromptItem]) -> None:
    """Record the inputs of the output folder: nothing that was made of others is reused.

    Images count by name and content: a copy of them continues a run.
    """
    digests: dict[Path, str] = {}
    stated = []
    for item in items:
        for name, (file, _) in item.sources.items():
            if file not in digests:
                digests[file] = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
            stated.append([item.folder, item.prompt, name, file.name, digests[file]])
    digest = hashlib.blake2b(json.dumps(stated).encode(), digest_size=16).hexdigest()
    note = output / "work" / "inputs.txt"
    if note.is_file() and note.read_text() != digest:
        raise PacoRewardError(
            f"{output} was built from other prompts or images; choose another --output, "
            "or delete it"
        )
    _write(note, digest)


def _write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Cut or copy to OUTPUT/images/<idx>/ what is not there yet.

    Returns the number of all sub-figures.
    """

    @lru_cache(maxsize=1)  # the panels of an image follow each other
    def cut(file: Path, rows: int, cols: int) -> list[Image.Image]:
        return split_image(load_image(file), rows, cols)

    for item in items:
        for name, (file, panel) in item.sources.items():
            target = output / "images" / item.folder / name
            if target.exists():
                continue
            try:
                if panel is None:
                    content = file.read_bytes()
                else:
                    content = encode(cut(file, item.grid.rows, item.grid.cols)[panel])
            except ValueError as error:
                raise PacoRewardError(f"{item.place}: {file}: {error}") from error
            _write(target, content)
    return sum(len(item.sources) for item in items)


def _write_datasets(
    output: Path, datasets: Mapping[str, Sequence[LabeledPair]], images: str
) -> dict[str, dict[str, int]]:
    """NAME.json for each data set (ShareGPT), and dataset_info.json.

    ``images`` stands before each question.
    """
    info = {}
    numbers = {}
    for name, pairs in datasets.items():
        rows = []
        for pair in pairs:
            question = {"role": "user", "content": f"{images}{pair.question}"}
            answer = {"role": "assistant", "content": pair.reason or pair.verdict}
            rows.append({"messages": [question, answer], "images": [pair.first, pair.second]})
        _write_json(output / f"{name}.json", rows)
        info[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": _TAGS,
        }
        yes = sum(pair.label for pair in pairs)
        numbers[name] = {
            "pairs": len(pairs),
            "yes": yes,
            "no": len(pairs) - yes,
            "groups": len({pair.group for pair in pairs}),
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
