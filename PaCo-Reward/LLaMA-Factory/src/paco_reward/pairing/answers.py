"""A model's answers over a server: P(Yes) for rankings and edits, reasons."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from paco_judge.client import JudgeClient
from paco_judge.images import load_image
from paco_judge.questions import Pair, load_question
from paco_judge.verdict import verdict_of
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.inputs import CandidateSet, Ranking, ReasonRow
from paco_reward.pairing.select import LabeledPair

REASON = "reason"  # the template of a request for reasons
REASON_TOKENS = 256
_PAIRS_AT_ONCE = 64
# What a model may put around the first word of an answer, and after it.
_VERDICT = re.compile(r"[\s\"'“”*_#>\-]*(yes|no)", re.IGNORECASE)
_MARKS_AFTER = " \t\n\r\"'“”*_.,:;!-–—"
_FEWEST_REASON_CHARACTERS = 12

logger = logging.getLogger(__name__)

PairQuestion = tuple[str, str, str]  # two images, relative to OUTPUT, and the question
ValueOrError = tuple[Any, str | None]


class Journal:
    """Answers of a server in a file, so that a killed run repeats no question.

    Args:
        file: JSON lines with ``key`` and ``value``; made if it does not exist.

    Raises:
        PacoRewardError: The file is damaged. A last line that a kill cut off is dropped.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a+b")
        whole, line_feed, _ = file.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole) + len(line_feed))
        try:
            rows = [json.loads(line) for line in whole.splitlines()]
            self.values: dict[str, Any] = {row["key"]: row["value"] for row in rows}
        except (ValueError, LookupError, TypeError) as error:
            self._file.close()
            raise PacoRewardError(
                f"{file} has a damaged line ({error}); remove that line to ask again"
            ) from error

    def append(self, key: str, value: Any) -> None:
        """Keep an answer; it is in the file when this returns."""
        self.values[key] = value
        self._file.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def scores(
    questions: Sequence[PairQuestion], output: Path, judge: JudgeClient, what: str
) -> dict[PairQuestion, float]:
    """P(Yes) to each question that was answered.

    Raises PacoRewardError: The server answers nothing.
    """

    def ask(pairs: list[Pair]) -> list[ValueOrError]:
        return [(verdict.p_yes, verdict.error) for verdict in judge.score(pairs)]

    model = judge.check()
    form = astuple(judge.form)
    keys = {question: json.dumps([model, *question, *form]) for question in questions}
    with Journal(output / "work" / "scores.jsonl") as journal:
        return _ask(keys, journal, output, ask, what)


def texts(
    questions: Sequence[PairQuestion], output: Path, judge: JudgeClient, what: str
) -> dict[PairQuestion, str]:
    """The whole answer to each question that was answered.

    Raises PacoRewardError: The server answers nothing.
    """

    def ask(pairs: list[Pair]) -> list[ValueOrError]:
        return [(answer.text, answer.error) for answer in judge.generate(pairs, REASON_TOKENS)]

    model = judge.check()
    keys = {question: json.dumps([model, *question]) for question in questions}
    with Journal(output / "work" / "reasons.jsonl") as journal:
        return _ask(keys, journal, output, ask, what)


def _ask(
    keys: Mapping[PairQuestion, str],
    journal: Journal,
    output: Path,
    ask: Callable[[list[Pair]], list[ValueOrError]],
    what: str,
) -> dict[PairQuestion, Any]:
    """Ask what the journal does not hold; returns what it holds then."""
    open_questions = [question for question, key in keys.items() if key not in journal.values]
    errors: list[str] = []
    starts = range(0, len(open_questions), _PAIRS_AT_ONCE)
    for start in tqdm(starts, desc=what, unit_scale=_PAIRS_AT_ONCE):
        batch = open_questions[start : start + _PAIRS_AT_ONCE]
        pairs = [
            Pair(load_image(output / first), load_image(output / second), text)
            for first, second, text in batch
        ]
        batch_errors = []
        for question, (value, error) in zip(batch, ask(pairs), strict=True):
            if error is None:
                journal.append(keys[question], value)
            else:
                batch_errors.append(error)
        errors += batch_errors
        # A whole batch without an answer, or nothing answered ever: then it is the server.
        is_evidence = len(batch) == _PAIRS_AT_ONCE or not journal.values
        if len(batch_errors) == len(batch) and is_evidence:
            raise PacoRewardError(
                f"no answer to {len(batch)} {what}, first: {batch_errors[0]}; run again to continue"
            )
    if errors:
        logger.warning(
            "no answer to %d of %d %s, first: %s; run again",
            len(errors),
            len(open_questions),
            what,
            errors[0],
        )
    return {
        question: journal.values[key] for question, key in keys.items() if key in journal.values
    }


def rank_by_scores(
    sets: Sequence[CandidateSet],
    questions: Mapping[str, str],
    output: Path,
    judge: JudgeClient,
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
    known = scores(pair_questions, output, judge, "rankings")
    rankings = []
    for candidates in sets:
        p_yes = {
            name: known.get(question_about(candidates, name)) for name in candidates.comp_images
        }
        if None in p_yes.values():
            counts["rankings_without_answer"] += 1
            continue
        ranked = sorted(p_yes, key=p_yes.get, reverse=True)
        values = [p_yes[name] for name in ranked]
        rankings.append(Ranking(**dict(candidates), rank_images=ranked, scores=values))
    return rankings


def label_edits(
    pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, min_gap: float, counts: Counter
) -> list[LabeledPair]:
    """Editing pairs with a judge's labels.

    Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2, none in between.
    """
    keys = [(pair.first, pair.second, pair.question) for pair in pairs]
    known = scores(keys, output, judge, "editing labels")
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
    pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, counts: Counter
) -> list[LabeledPair]:
    """The pairs whose written answer agrees with their label, each with that answer."""
    template = load_question(REASON)
    keys = {}
    for pair in pairs:
        request = template.text(question=pair.question, verdict=pair.verdict)
        keys[pair] = (pair.first, pair.second, request)
    known = texts(list(keys.values()), output, judge, "reasons")
    answered = [(pair, known[key]) for pair, key in keys.items() if key in known]
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
        verdict_and_reasons = read_reason(answer)
        if verdict_and_reasons is None:
            counts["reasons_unreadable"] += 1
            continue
        verdict, reasons = verdict_and_reasons
        if verdict != pair.verdict:
            counts["reasons_contradicting"] += 1
            continue
        counts["reasons_kept"] += 1
        kept.append(replace(pair, reason=f"{verdict}. {reasons}"))
    return kept


def read_reason(answer: str) -> tuple[str, str] | None:
    """``("Yes", "Both show …")`` of a written answer; None without a verdict or without reasons.

    Models write the verdict in bold, in quotation marks or in capitals, too.
    """
    word = _VERDICT.match(answer)
    if word is None:
        return None
    rest = answer[word.end() :].lstrip("_*")
    says_yes = verdict_of(word[1].capitalize() + rest)
    if says_yes is None:  # "Nothing", "Not sure"
        return None
    reasons = " ".join(rest.lstrip(_MARKS_AFTER).split()).strip("*_ ")
    is_reserved = any(token in reasons for token in (TAG, *RESERVED))
    if len(reasons) < _FEWEST_REASON_CHARACTERS or is_reserved:
        return None
    return "Yes" if says_yes else "No", reasons[0].upper() + reasons[1:]
