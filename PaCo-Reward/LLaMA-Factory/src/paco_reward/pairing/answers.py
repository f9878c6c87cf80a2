"""A model's answers over a server: P(Yes) for rankings and edits, reasons."""

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from paco_judge.client import JudgeClient
from paco_judge.errors import UserError
from paco_judge.files import Journal
from paco_judge.identity import UNRECORDED, Match, match
from paco_judge.images import load_image
from paco_judge.questions import Pair, load_question
from paco_reward.datasets import PLACEHOLDERS
from paco_reward.pairing.inputs import CandidateSet, Ranking, ReasonRow
from paco_reward.pairing.select import LabeledPair

REASON = "reason"  # the template of a request for reasons
REASON_TOKENS = 256
_PAIRS_AT_ONCE = 64
# Words that follow the answer No ("No they differ"), never the "no" of "no difference".
_AFTER_NO = """they the it its it's it’s this that these those there their he she his her we you i both
a an some each all every because since as in on at with while when where if but although not only is
are was were has have do does"""
# A verdict at the start of an answer, and the marks that people and models put around it.
_VERDICT = re.compile(
    rf"""[\s"'“”*_#>-]*(yes|no)
    (?:["'”*_]+ | (?=\s*[.,:;!–—\n]) | (?=\s+-\s) | (?=\s*$) | (?<=yes)(?=\s)
    | (?<=no)(?=\s+(?:{"|".join(_AFTER_NO.split())})\b))
    \s*[.,:;!–—]*(?:-\s)?["'”*_]*\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_FEWEST_REASON_CHARACTERS = 12

logger = logging.getLogger(__name__)

PairQuestion = tuple[str, str, str]  # two images, relative to OUTPUT, and the question


class Judge(NamedTuple):
    """The judge that is asked."""

    client: JudgeClient
    # Answers in the journal count also where it is not known whether they are of its weights.
    continue_unknown: bool


def ask(
    questions: Sequence[PairQuestion],
    output: Path,
    judge: Judge,
    what: str,
    writes: bool = False,
) -> dict[PairQuestion, Any]:
    """P(Yes) to each question that was answered; the whole answer if the judge ``writes``.

    A journal in OUTPUT/work keeps the answers, so that a killed run repeats no question.

    Args:
        questions: What is asked; only what the journal lacks is asked again.
        output: The folder of the images.
        judge: Its weights and the form of the request tell its answers from all others.
        what: The questions, for messages.
        writes: Whether reasons are wanted.

    Raises:
        UserError: The server answers nothing, or the journal's answers may be another judge's.
    """
    client = judge.client
    form = () if writes else astuple(client.form)
    keys = {question: json.dumps([*question, *form]) for question in questions}
    stamp = {"judge": client.check(), "weights": client.identity()}
    answers_to = partial(client.generate, max_tokens=REASON_TOKENS) if writes else client.score
    file = output / "work" / ("reasons.jsonl" if writes else "scores.jsonl")
    with Journal(file) as journal:
        values = _known_values(journal, set(keys.values()), stamp["weights"], judge)
        open_questions = []
        for question, key in keys.items():
            if key not in values:
                open_questions.append(question)
        errors: list[str] = []
        starts = range(0, len(open_questions), _PAIRS_AT_ONCE)
        for start in tqdm(starts, desc=what, unit_scale=_PAIRS_AT_ONCE):
            batch = open_questions[start : start + _PAIRS_AT_ONCE]
            pairs = []
            for first, second, text in batch:
                pairs.append(Pair(load_image(output / first), load_image(output / second), text))
            batch_errors = []
            for question, answer in zip(batch, answers_to(pairs), strict=True):
                value, error = astuple(answer)
                if error is None:
                    values[keys[question]] = value
                    journal.append(stamp | {"key": keys[question], "value": value})
                else:
                    batch_errors.append(error)
            errors += batch_errors
            # A whole batch without an answer, or nothing answered ever: then it is the server.
            is_evidence = len(batch) == _PAIRS_AT_ONCE or not values
            if len(batch_errors) == len(batch) and is_evidence:
                raise UserError(
                    f"no answer to {len(batch)} {what}, first: {batch_errors[0]}; run again to "
                    "continue"
                )
    if errors:
        logger.warning(
            "no answer to %d of %d %s, first: %s; run again",
            len(errors),
            len(open_questions),
            what,
            errors[0],
        )
    return {question: values[key] for question, key in keys.items() if key in values}


def _known_values(
    journal: Journal, keys: set[str], weights: str | None, judge: Judge
) -> dict[str, Any]:
    """The answers of these weights in the journal, by key; other weights are asked themselves.

    Raises UserError: Of some it is not known whose they are, and ``judge`` does not take those.
    """
    values = {}
    for row in journal.rows:
        key = row["key"]
        if "weights" not in row:  # an earlier version's, with the served name in front
            key = json.dumps(json.loads(key)[1:])
        of_row = match(row.get("weights", UNRECORDED), weights)
        if key not in keys or of_row is Match.DIFFERENT:
            continue
        if of_row is not Match.SAME and not judge.continue_unknown:
            raise UserError(
                f"{journal.path} has answers of a judge, and whether it had the same weights is "
                f"unknown ({of_row.value}): delete the file to ask again, or pass "
                "--continue_unknown to continue it"
            )
        values[key] = row["value"]
    return values


def rank_by_scores(
    sets: Sequence[CandidateSet],
    questions: Mapping[str, str],
    output: Path,
    judge: Judge,
    counts: Counter,
) -> list[Ranking]:
    """Rank the candidates of each set by a judge's P(Yes) on (reference, candidate).

    Sets with a missing score are left out and counted; the next run asks again.
    """

    def question_about(candidates: CandidateSet, name: str) -> PairQuestion:
        folder = candidates.folder
        reference = f"images/{folder}/{candidates.ref_image}"
        return reference, f"images/{folder}/{name}", questions[folder]

    pair_questions = []
    for candidates in sets:
        pair_questions += [question_about(candidates, name) for name in candidates.comp_images]
    known = ask(pair_questions, output, judge, "rankings")
    rankings = []
    for candidates in sets:
        p_yes = {}
        for name in candidates.comp_images:
            p_yes[name] = known.get(question_about(candidates, name))
        if None in p_yes.values():
            counts["rankings_without_answer"] += 1
            continue
        ranked = sorted(p_yes, key=p_yes.get, reverse=True)
        values = list(map(p_yes.get, ranked))
        rankings.append(Ranking(**dict(candidates), rank_images=ranked, scores=values))
    return rankings


def label_edits(
    pairs: Sequence[LabeledPair], output: Path, judge: Judge, min_gap: float, counts: Counter
) -> list[LabeledPair]:
    """Editing pairs with a judge's labels.

    Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2, none in between.
    """
    keys = [(pair.first, pair.second, pair.question) for pair in pairs]
    known = ask(keys, output, judge, "editing labels")
    labeled = []
    for pair, p_yes in zip(pairs, map(known.get, keys), strict=True):
        if p_yes is None:
            counts["editing_without_answer"] += 1
        elif abs(p_yes - 0.5) < min_gap / 2:
            counts["editing_unclear"] += 1
        else:
            labeled.append(replace(pair, label=p_yes >= 0.5))
    return labeled


def write_reasons(
    pairs: Sequence[LabeledPair], output: Path, judge: Judge, counts: Counter
) -> list[LabeledPair]:
    """The pairs whose written answer agrees with their label, each with that answer."""
    template = load_question(REASON)
    keys = {}
    for pair in pairs:
        request = template.text(question=pair.question, verdict=pair.verdict)
        keys[pair] = (pair.first, pair.second, request)
    known = ask(list(keys.values()), output, judge, "reasons", writes=True)
    answered = []
    for pair, key in keys.items():
        if key in known:
            answered.append((pair, known[key]))
    counts["reasons_without_answer"] += len(keys) - len(answered)
    return _agreeing(answered, counts)


def given_reasons(
    pairs: Sequence[LabeledPair], written: Mapping[frozenset[str], ReasonRow], counts: Counter
) -> list[LabeledPair]:
    """The pairs whose human-written reason agrees with their label, in its image order."""
    answered = []
    for pair in pairs:
        if row := written.get(frozenset((pair.first, pair.second))):
            first, second = (f"images/{row.folder}/{name}" for name in row.images)
            answered.append((replace(pair, first=first, second=second), row.reason))
        else:
            counts["reasons_missing"] += 1
    return _agreeing(answered, counts)


def _agreeing(answered: Sequence[tuple[LabeledPair, str]], counts: Counter) -> list[LabeledPair]:
    kept = []
    for pair, answer in answered:
        says_yes, reasons = split_verdict(answer)
        is_plain = not any(placeholder in reasons for placeholder in PLACEHOLDERS)
        if says_yes is None or len(reasons) < _FEWEST_REASON_CHARACTERS or not is_plain:
            counts["reasons_unreadable"] += 1
        elif says_yes != pair.label:
            counts["reasons_contradicting"] += 1
        else:
            counts["reasons_kept"] += 1
            kept.append(replace(pair, reason=f"{pair.verdict}. {reasons}"))
    return kept


def split_verdict(answer: str) -> tuple[bool | None, str]:
    """Whether a written answer begins with Yes, and the sentences after that word.

    People and models write the verdict in bold, in quotation marks or in capitals, too. None, and
    the whole answer, where it begins with neither: "Nothing", "No-one". "No difference can be
    seen" is no verdict either: a mark, the line's end or a word like "they" follows one.
    """
    match = _VERDICT.match(answer)
    reasons = answer if match is None else answer[match.end() :]
    reasons = " ".join(reasons.split()).strip("*_ ")
    says_yes = None if match is None else match[1].lower() == "yes"
    return says_yes, reasons[:1].upper() + reasons[1:]
