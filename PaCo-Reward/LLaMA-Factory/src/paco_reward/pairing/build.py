"""All steps of building a data set: cut, rank, label, clean, split, add reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        panels and edits
  pair_images/…                           images of --pairs
  prompt_data.jsonl, sets.jsonl           what was paired
  consistency_full_rank.jsonl             the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  split.json                              where themes and images belong: later calls keep it
  stats.json                              numbers by NAME
  work/                                   answers of the server: delete to ask again
"""

import logging
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paco_judge.client import JudgeClient
from paco_judge.errors import UserError
from paco_judge.files import read_json, write_json, write_json_lines
from paco_judge.identity import fingerprint
from paco_judge.questions import (
    EDITING,
    Question,
    RequestForm,
    form_of,
    load_editing_questions,
    load_question,
    record,
)
from paco_reward.datasets import Example, pair_prefix
from paco_reward.options import MAX_CONCURRENCY
from paco_reward.pairing import answers, files, inputs, mend, own_pairs, select
from paco_reward.pairing.files import COT, PARTS, TEST, TRAIN
from paco_reward.pairing.inputs import EditRow, PromptItem, Ranking, ReasonRow
from paco_reward.pairing.own_pairs import OwnPairs
from paco_reward.pairing.select import LabeledPair
from paco_reward.pairing.splits import SPLIT, Split

EDITING_NAME = "sharegpt_editing"
STATS = "stats.json"
_FEW_PAIRS = 40  # for testing

logger = logging.getLogger(__name__)

Parts = dict[str, list[LabeledPair]]  # the pairs of TRAIN and of TEST


@dataclass
class Inputs:
    """What the options name, read and checked."""

    form: RequestForm
    question: Question
    editing_questions: tuple[Question, ...]
    items: list[PromptItem] = field(default_factory=list)
    edits: list[EditRow] = field(default_factory=list)
    rankings: list[Ranking] | None = None  # by people
    reasons: dict[frozenset[str], ReasonRow] | None = None  # written by people
    judge: answers.Judge | None = None
    user_pairs: OwnPairs | None = None
    beside: list[Example] = field(default_factory=list)  # pairs that labels of --mend come beside


def build(options: Namespace) -> dict[str, dict[str, Any]]:
    """Build the data sets; returns what stats.json then holds about each of this call's names.

    Problems of options, inputs and server are raised before anything is cut or asked (ValueError,
    OSError, UserError).
    """
    read = read_inputs(options)
    if not options.mend:  # which adds to a data set, whoever has built it
        identity = _identity(options, read)
        rows = _rows(options, read)
        files.claim(options.output, identity, rows, options.name, options.continue_unknown)
    stats = {}

    def step(name: str, label_pairs: Callable, questions: Sequence[Question]) -> None:
        counts: Counter[str] = Counter()
        pairs = label_pairs(options, read, counts)
        numbers = _write(options, read, name, pairs, counts)
        asked = list(questions)
        if options.reasons:
            asked.append(load_question(answers.REASON))
        stats[name] = {
            "seed": options.seed,
            "judge": read.judge.client.identity() if read.judge else None,
            "asked": record(asked, read.form),
            "counts": dict(+counts),  # without zeros
            "datasets": numbers,
        }

    if read.items:
        step(options.name, theme_pairs, (read.question,))
    editing_name = f"{options.name}{mend.SUFFIX}" if options.mend else EDITING_NAME
    if read.edits and not options.sets_only:
        step(editing_name, editing_pairs, read.editing_questions)
    if read.user_pairs:
        name = f"{options.name}{mend.SUFFIX}" if options.mend else options.name
        step(name, user_pairs, tuple(read.user_pairs.questions.values()))
    file = options.output / STATS
    before = read_json(file) if file.exists() else {}
    write_json(file, before | stats)
    return stats


def read_inputs(options: Namespace) -> Inputs:
    """Read all files, and ask the server for its model. Raises ValueError, OSError, UserError."""
    question = load_question(options.question or "theme", ("theme",))
    read = Inputs(form_of(options), question, load_editing_questions(options.editing_question))
    if options.grids:
        read.items = inputs.read_prompts(options.metadata, options.grids)
    by_folder = {item.folder: item for item in read.items}
    if options.editing:
        read.edits = inputs.read_edits(options.editing, bool(options.server))
    if options.rankings:
        read.rankings = inputs.read_rankings(options.rankings, by_folder)
    if options.reasons_file:
        read.reasons = inputs.read_reasons(options.reasons_file, by_folder)
    if options.server:
        client = JudgeClient(
            options.server, options.model, max_concurrency=MAX_CONCURRENCY, form=read.form
        )
        client.check()
        read.judge = answers.Judge(client, options.continue_unknown)
    if options.mend:
        read.beside = mend.read_beside(options)
    if options.mend and mend.are_edits(options):
        read.edits = inputs.read_edits(options.mend, has_server=False)
    elif options.pairs or options.mend:
        file = options.pairs or options.mend
        read.user_pairs = own_pairs.read_pairs(file, options.question, options.min_gap)
    problems = inputs.Problems()
    for asked in (question, *read.editing_questions):
        with problems.of(f"question {asked.name}"):
            inputs.plain_text(asked.template)
    with problems.of("--image_labels"):
        inputs.plain_text(read.form.image_labels or "")
    problems.raise_if_any()
    return read


def _identity(options: Namespace, read: Inputs) -> dict[str, Any]:
    """What each part of the output is made from, without labels: those may be corrected."""
    identity: dict[str, Any] = {}
    if read.items:
        prompts = [[item.folder, item.prompt, fingerprint(*item.files)] for item in read.items]
        identity["images/"] = identity[options.name] = prompts
    if read.edits:
        identity[EDITING_NAME] = [
            [edit.instruction, fingerprint(edit.source, edit.edited)] for edit in read.edits
        ]
    if read.user_pairs:
        identity[options.name] = read.user_pairs.shown
    return identity


def _rows(options: Namespace, read: Inputs) -> dict[str, list[list[str]]]:
    """The rows of the parts that grow: two images by content, and the text about them."""
    rows = {}
    if read.edits:
        rows[EDITING_NAME] = [
            [fingerprint(edit.source), fingerprint(edit.edited), edit.instruction]
            for edit in read.edits
        ]
    if read.user_pairs:
        rows[options.name] = read.user_pairs.shown
    return rows


def theme_pairs(options: Namespace, read: Inputs, counts: Counter) -> list[LabeledPair]:
    """Pairs of panels: sets, rankings, labels. Empty if only sets for people are wanted."""
    counts["prompts"] = len(read.items)
    counts["sub_figures"] = files.write_sub_figures(read.items, options.output)
    prompts = [{"idx": item.folder, "prompt": item.prompt} for item in read.items]
    write_json_lines(options.output / "prompt_data.jsonl", prompts)
    questions = {}  # by prompt
    for item in read.items:
        questions[item.folder] = read.question.text(theme=item.grid.theme)
    rankings = read.rankings
    if rankings is None:
        sets = _candidate_sets(options, read.items, counts)
        if options.sets_only:
            made_from = {"grids": options.grids.resolve(), "metadata": options.metadata.resolve()}
            note = {name: str(place) for name, place in made_from.items()}
            write_json(options.output / "sets.json", note)
            return []
        rankings = answers.rank_by_scores(sets, questions, options.output, read.judge, counts)
    counts["rankings"] = len(rankings)
    fields = {"folder", "ref_image", "comp_images", "rank_images"}
    rows = []
    for ranking in rankings:
        rows.append(ranking.model_dump(include=fields | ({"equal"} if ranking.equal else set())))
    write_json_lines(options.output / "consistency_full_rank.jsonl", rows)
    labeled = []
    for ranking in rankings:
        labels = select.labels_of_ranking(
            ranking, options.yes_ranks, options.no_ranks, options.min_gap
        )
        labeled.append((ranking, labels))
    groups = {item.folder: item.group for item in read.items}
    pairs = select.pairs_of_rankings(labeled, groups, questions, options.seed, counts)
    counts["pairs_labeled"] = len(pairs)
    return pairs


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
    write_json_lines(options.output / "sets.jsonl", rows)
    return sets


def editing_pairs(options: Namespace, read: Inputs, counts: Counter) -> list[LabeledPair]:
    """A pair for each question on each edit, with its label or a judge's.

    Images are copied to OUTPUT by content hash.
    """
    counts["edits"] = len(read.edits)
    pairs = []
    unlabeled = []
    for edit in read.edits:
        first = files.stored(Path(edit.source), options.output)
        second = files.stored(Path(edit.edited), options.output)
        labels = _edit_labels(edit, read.editing_questions)
        for question, (kind, label) in zip(read.editing_questions, labels, strict=True):
            text = question.text(instruction=edit.instruction.strip())
            pair = LabeledPair(first, second, text, bool(label), kind)
            (unlabeled if label is None else pairs).append(pair)
    if read.judge and unlabeled:
        pairs += answers.label_edits(unlabeled, options.output, read.judge, options.min_gap, counts)
    counts["pairs_labeled"] = len(pairs)
    return pairs


def _edit_labels(edit: EditRow, questions: Sequence[Question]) -> list[tuple[str, bool | None]]:
    """(kind, label) of each question about an edit.

    A single question of the user's own is about the whole: its label is Yes if all that the row
    states are.
    """
    stated = dict(zip(EDITING, (edit.consistency, edit.follows), strict=True))
    if len(questions) == 2:
        return list(stated.items())
    name = questions[0].name
    if name in stated:
        return [(name, stated[name])]
    labels = [label for label in stated.values() if label is not None]
    return [("editing", all(labels) if labels else None)]


def user_pairs(options: Namespace, read: Inputs, counts: Counter) -> list[LabeledPair]:
    """A user's own pairs, all of them that have a usable label."""
    counts.update(read.user_pairs.counts)
    for name, file in read.user_pairs.images.items():
        files.write_image(options.output / name, file.read_bytes())
    return read.user_pairs.pairs


def _write(
    options: Namespace,
    read: Inputs,
    name: str,
    labeled: Sequence[LabeledPair],
    counts: Counter,
) -> dict[str, dict[str, int]]:
    """Clean, split and write the data sets of a name; returns their numbers."""
    earlier = Split.read(options.output)
    if options.sets_only:
        if not counts["sets"]:
            raise UserError(_nothing_left("sets", counts))
        earlier.choose_themes(read.items, options.test_share, options.seed)
        earlier.write(options.output)
        return {}
    items = [] if name == EDITING_NAME else read.items
    is_told = options.mend or not options.test_share  # where each pair goes, this once
    known = Split() if is_told else earlier
    pairs = clean(labeled, options, counts, known)
    testing: set[str] = set()
    if options.mend:
        mend.warn_of_other_answers(pairs, read.beside, options)
        mended = Split(images=earlier.mended)
        parts = mend.parts_of(pairs, options, read.beside, mended.groups(pairs, items), counts)
        mended.add(pairs, items, {pair.group for pair in parts[TEST]})
        earlier.mended = mended.images
    else:
        testing = testing_groups(pairs, items, options, known)
        parts = split(pairs, testing, options.seed, counts)
    _warn_of_kept(earlier, parts[TRAIN], items, options)
    has_reasons = options.reasons or read.reasons is not None and name != EDITING_NAME
    if has_reasons:
        parts = with_reasons(parts, options, read, counts)
    if not any(parts.values()):
        raise UserError(_nothing_left("balanced pairs", counts))
    if options.mend:
        earlier.write(options.output)
    else:
        _warn_of_few(parts, options)
        if options.test_share:
            known.add(pairs, items, testing)
            known.write(options.output)
    full_name = f"{name}{COT}" if has_reasons else name
    datasets = {}
    for part, of_part in parts.items():
        if of_part:
            datasets[f"{full_name}_{part}"] = of_part
    return files.write_datasets(options.output, name, datasets, pair_prefix(read.form))


def clean(
    labeled: Sequence[LabeledPair],
    options: Namespace,
    counts: Counter,
    known: Split | None = None,
) -> list[LabeledPair]:
    """The pairs in random order, without near-duplicates, and in groups.

    A user's similar images may have labels of their own: what makes them differ may be what the
    judge is to learn. They only stay on one side.
    """
    images = {image for pair in labeled for image in (pair.first, pair.second)}
    leader = select.leaders(images, options.output, options.duplicate_bits)
    are_own = options.pairs or options.mend
    original = {image: image for image in images} if are_own else leader
    pairs = select.without_duplicates(select.shuffled(labeled, options.seed), original, counts)
    if known is not None:
        pairs = known.without_crossing(pairs, leader, counts)
    return select.with_groups(pairs, leader)


def testing_groups(
    pairs: Sequence[LabeledPair], items: Sequence[PromptItem], options: Namespace, known: Split
) -> set[str]:
    """Groups for testing: those of the metadata and of earlier calls, and a share of the rest."""
    decided = known.groups(pairs, items)
    undecided = [pair for pair in pairs if pair.group not in decided]
    testing = select.groups_for_testing(undecided, options.test_share, options.seed)
    return testing | {group for group, part in decided.items() if part == TEST}


def _warn_of_kept(
    earlier: Split, train: Sequence[LabeledPair], items: Sequence[PromptItem], options: Namespace
) -> None:
    """Say if pairs for training show what an earlier call keeps for testing."""
    groups = {pair.group for pair in train}
    shown = {image for pair in train for image in (pair.first, pair.second)}
    themes = {item.theme for item in items if item.group in groups}
    num_themes = sum(earlier.themes.get(theme) == TEST for theme in themes)
    num_images = sum(earlier.images.get(image) == TEST for image in shown)
    if num_themes or num_images:
        logger.warning(
            "%d themes and %d images of the training pairs are for testing in %s: do not measure "
            "the judge on pairs or a benchmark of them",
            num_themes,
            num_images,
            options.output / SPLIT,
        )


def _warn_of_few(parts: Parts, options: Namespace) -> None:
    """Say that there are no pairs for testing, or few."""
    num_tested = len(parts[TEST])
    if options.test_share and not num_tested:
        logger.warning(
            "no pairs for testing: pairs of a theme, or that share an image, stay together, and "
            "none of these groups can be spared; bring pairs of other images"
        )
    elif options.test_share and num_tested < _FEW_PAIRS:
        logger.warning(
            "only %d of %d pairs are for testing, which tells an accuracy to ±%.2f: raise "
            "--test_share (%s), or bring pairs of other images",
            num_tested,
            num_tested + len(parts[TRAIN]),
            1 / math.sqrt(num_tested),  # two standard errors of a share near one half
            options.test_share,
        )


def split(pairs: Sequence[LabeledPair], testing: set[str], seed: int, counts: Counter) -> Parts:
    """The pairs of TRAIN and of TEST, as many Yes as No of each kind."""
    parts: Parts = {}
    for part in PARTS:
        of_part = [pair for pair in pairs if (pair.group in testing) == (part == TEST)]
        parts[part] = select.balanced(of_part, seed)
        counts["unbalanced"] += len(of_part) - len(parts[part])
    return parts


def with_reasons(parts: Parts, options: Namespace, read: Inputs, counts: Counter) -> Parts:
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
    testing = {pair.group for pair in parts[TEST]}
    return split(explained, testing, options.seed, counts)


def _nothing_left(what: str, counts: Counter) -> str:
    lost = ", ".join(f"{name} {count}" for name, count in (+counts).items())
    return f"no {what} are left ({lost}); add images or labels, or loosen the options"
