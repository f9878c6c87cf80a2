"""All steps of building a data set: cut, rank, label, clean, split, add reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        sub-figures and edits
  pair_images/…                           images of --pairs
  prompt_data.jsonl, sets.jsonl           what was paired
  consistency_full_rank.jsonl             the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  stats.json                              numbers by NAME
  work/                                   answers of the server: delete to ask again
"""

import json
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paco_judge.client import JudgeClient
from paco_judge.errors import UserError
from paco_judge.files import fingerprint
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
from paco_reward.options import client_of
from paco_reward.pairing import answers, files, inputs, own_pairs, select
from paco_reward.pairing.files import COT, PARTS, TEST, TRAIN
from paco_reward.pairing.inputs import EditRow, PromptItem, Ranking, ReasonRow
from paco_reward.pairing.own_pairs import OwnPairs
from paco_reward.pairing.select import LabeledPair

EDITING_NAME = "sharegpt_editing"
STATS = "stats.json"

logger = logging.getLogger(__name__)

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
    user_pairs: OwnPairs | None

    def theme_questions(self) -> dict[str, str]:
        """What is asked about sub-figures, by prompt."""
        return {item.folder: self.question.text(theme=item.grid.theme) for item in self.items}


def build(options: Namespace) -> dict[str, dict[str, Any]]:
    """Build the data sets; returns what stats.json then holds about each of this call's names.

    Problems of options, inputs and server are raised before anything is cut or asked (ValueError,
    OSError, UserError).
    """
    read = read_inputs(options)
    output = options.output
    files.claim(output, _identity(options, read))
    stats = {}

    def step(name: str, make_parts: Callable, questions: Sequence[Question], cot: bool) -> None:
        counts: Counter[str] = Counter()
        parts = make_parts(options, read, counts)
        numbers = _write(options, read, name, parts, cot, counts)
        stats[name] = _stats(options, read, questions, counts, numbers)

    if read.items:
        cot = options.reasons or read.reasons is not None
        step(options.name, theme_parts, (read.question,), cot)
    if read.edits and not options.sets_only:
        step(EDITING_NAME, editing_parts, read.editing_questions, options.reasons)
    if read.user_pairs:
        step(options.name, user_parts, read.user_pairs.questions, options.reasons)
    file = output / STATS
    before = json.loads(file.read_bytes()) if file.exists() else {}
    files.write_json(file, before | stats)
    return stats


def _identity(options: Namespace, read: Inputs) -> dict[str, Any]:
    """What each part of the output is made from, without labels: those may be corrected."""
    identity: dict[str, Any] = {}
    if read.items:
        prompts = []
        for item in read.items:
            images = dict.fromkeys(file for file, _ in item.sources.values())
            prompts.append([item.folder, item.prompt, list(item.sources), fingerprint(*images)])
        identity["images/"] = identity[options.name] = prompts
    if read.edits:
        identity[EDITING_NAME] = [
            [edit.instruction, fingerprint(edit.source, edit.edited)] for edit in read.edits
        ]
    if read.user_pairs:
        identity[options.name] = read.user_pairs.shown
    return identity


def _write(
    options: Namespace,
    read: Inputs,
    name: str,
    parts: Parts,
    cot: bool,
    counts: Counter,
) -> dict[str, dict[str, int]]:
    """Write the data sets of a name; returns their numbers."""
    if options.sets_only:
        if not counts["sets"]:
            raise UserError(_nothing_left("sets", counts))
        return {}
    if not any(parts.values()):
        raise UserError(_nothing_left("balanced pairs", counts))
    full_name = f"{name}{COT}" if cot else name
    datasets = {f"{full_name}_{part}": pairs for part, pairs in parts.items() if pairs}
    return files.write_datasets(options.output, name, datasets, pair_prefix(read.form))


def _stats(
    options: Namespace,
    read: Inputs,
    questions: Sequence[Question],
    counts: Counter,
    numbers: dict[str, dict[str, int]],
) -> dict[str, Any]:
    """The entry of a name in stats.json."""
    of_reasons = [load_question(answers.REASON)] if options.reasons else []
    return {
        "seed": options.seed,
        "asked": record([*questions, *of_reasons], read.form),
        "counts": {reason: count for reason, count in counts.items() if count},
        "datasets": numbers,
    }


def read_inputs(options: Namespace) -> Inputs:
    """Read all files, and ask the server for its model. Raises ValueError, OSError, UserError."""
    form = form_of(options)
    question = load_question(options.question or "theme", ("theme",))
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
    user_pairs = None
    if options.pairs:
        user_pairs = own_pairs.read_pairs(options.pairs, options.question, options.min_gap)
    return Inputs(
        items=items,
        edits=edits,
        rankings=rankings,
        reasons=reasons,
        question=question,
        editing_questions=editing_questions,
        form=form,
        judge=judge,
        user_pairs=user_pairs,
    )


def theme_parts(options: Namespace, read: Inputs, counts: Counter) -> Parts:
    """Pairs of sub-figures: sets, rankings, labels. Empty if only sets for people are wanted."""
    counts["prompts"] = len(read.items)
    counts["sub_figures"] = files.write_sub_figures(read.items, options.output)
    prompts = [{"idx": item.folder, "prompt": item.prompt} for item in read.items]
    files.write_lines(options.output / "prompt_data.jsonl", prompts)
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
    testing = testing_groups(kept, decided, options)
    parts = split(kept, testing, options.seed, counts)
    if options.reasons or read.reasons is not None:
        return with_reasons(parts, testing, options, read, counts)
    return parts


def editing_parts(options: Namespace, read: Inputs, counts: Counter) -> Parts:
    """Pairs of edits with their labels, or a judge's."""
    counts["edits"] = len(read.edits)
    pairs, unlabeled = _editing_pairs(read.edits, options.output, read.editing_questions)
    if read.judge and unlabeled:
        pairs += answers.label_edits(unlabeled, options.output, read.judge, options.min_gap, counts)
    kept, leader = clean(pairs, options, counts)
    kept = _connected_groups(kept, leader)
    testing = testing_groups(kept, {}, options)
    parts = split(kept, testing, options.seed, counts)
    if options.reasons:
        return with_reasons(parts, testing, options, read, counts)
    return parts


def user_parts(options: Namespace, read: Inputs, counts: Counter) -> Parts:
    """A user's own pairs, all of them that have a usable label.

    Unlike generated pairs, similar images may have labels of their own: what makes them differ may
    be what the judge is to learn. They only stay on one side of the split.
    """
    counts.update(read.user_pairs.counts)
    files.write_images(read.user_pairs.images, options.output)
    leader = select.leaders(read.user_pairs.images, options.output, options.duplicate_bits)
    pairs = select.without_repetition(select.shuffled(read.user_pairs.pairs, options.seed), counts)
    pairs = _connected_groups(pairs, leader)
    testing = select.groups_with_both_labels(pairs, options.test_share, options.seed)
    if options.test_share and not testing:
        logger.warning(
            "no pairs for testing: too many share images, directly or through other pairs, or one "
            "label is too rare; bring pairs of other images, or measure on another data set"
        )
    parts = split(pairs, testing, options.seed, counts)
    if options.reasons:
        return with_reasons(parts, testing, options, read, counts)
    return parts


def _connected_groups(pairs: Sequence[LabeledPair], leader: Mapping[str, str]) -> list[LabeledPair]:
    """The pairs with their groups: one for all that share an image or near-duplicates of one."""
    groups = inputs.connected([(leader[pair.first], leader[pair.second]) for pair in pairs])
    return [
        replace(pair, group=pairs[first].first) for pair, first in zip(pairs, groups, strict=True)
    ]


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
    files.write_lines(options.output / "sets.jsonl", rows)
    return sets


def theme_pairs(
    options: Namespace, read: Inputs, rankings: Sequence[Ranking], counts: Counter
) -> list[LabeledPair]:
    """The labeled pairs of rankings, which are written to OUTPUT."""
    fields = {"folder", "ref_image", "comp_images", "rank_images"}
    rows = [ranking.model_dump(include=fields) for ranking in rankings]
    files.write_lines(options.output / "consistency_full_rank.jsonl", rows)
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
    counts["pairs_labeled"] += len(labeled)
    images = {image for pair in labeled for image in (pair.first, pair.second)}
    leader = select.leaders(images, options.output, options.duplicate_bits)
    shuffled = select.shuffled(labeled, options.seed)
    return select.without_duplicates(shuffled, leader, counts), leader


def testing_groups(
    pairs: Sequence[LabeledPair], decided: Mapping[str, str], options: Namespace
) -> set[str]:
    """Groups for testing: those ``decided`` by the metadata, and a share of the rest."""
    undecided = {pair.group for pair in pairs} - set(decided)
    testing = select.groups_for_testing(undecided, options.test_share, options.seed)
    return testing | {group for group, part in decided.items() if part == TEST}


def split(pairs: Sequence[LabeledPair], testing: set[str], seed: int, counts: Counter) -> Parts:
    """The pairs of TRAIN and of TEST, as many Yes as No of each kind."""
    parts: Parts = {}
    for part in PARTS:
        of_part = [pair for pair in pairs if (pair.group in testing) == (part == TEST)]
        parts[part] = select.balanced(of_part, seed)
        counts["unbalanced"] += len(of_part) - len(parts[part])
    return parts


def with_reasons(
    parts: Parts, testing: set[str], options: Namespace, read: Inputs, counts: Counter
) -> Parts:
    """The pairs with a reason that agrees with their label, by people or by the judge.

    They were balanced before, so that none is asked for a pair that is dropped, and are again, as
    pairs whose reason contradicts their label are dropped, too.
    """
    pairs = [*parts[TRAIN], *parts[TEST]]
    if read.reasons is not None:
        explained = answers.given_reasons(pairs, read.reasons, counts)
    else:
        explained = []
        bare = []
        for pair in pairs:
            if pair.reason is None:
                bare.append(pair)
            else:
                explained.append(pair)
        explained += answers.write_reasons(bare, options.output, read.judge, counts)
        explained = select.shuffled(explained, options.seed)
    return split(explained, testing, options.seed, counts)


def _nothing_left(what: str, counts: Mapping[str, int]) -> str:
    lost = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"no {what} are left ({lost}); add images or labels, or loosen the options"


def _editing_pairs(
    edits: Sequence[EditRow], output: Path, questions: Sequence[Question]
) -> tuple[list[LabeledPair], list[LabeledPair]]:
    """A pair for each question on each edit: labeled and other ones.

    Images are copied to OUTPUT by content hash.
    """
    labeled = []
    unlabeled = []
    for edit in edits:
        first = files.stored(Path(edit.source), output)
        second = files.stored(Path(edit.edited), output)
        labels = (edit.consistency, edit.follows)
        for label, kind, question in zip(labels, EDITING, questions, strict=False):
            text = question.text(instruction=edit.instruction.strip())
            pair = LabeledPair(first, second, text, bool(label), kind, first)
            if label is None:
                unlabeled.append(pair)
            else:
                labeled.append(pair)
    return labeled, unlabeled
