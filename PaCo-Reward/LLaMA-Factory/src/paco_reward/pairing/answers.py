"""A model's answers over a server: P(Yes) for rankings and edits, reasons."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paco_judge.client import JudgeClient, Pair
from paco_judge.images import load_image
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.inputs import CandidateSet, Ranking, ReasonRow
from paco_reward.pairing.select import LabeledPair

REASON_TOKENS = 256
_PAIRS_AT_ONCE = 64
_VERDICT = re.compile(r"^[\s\"'“”*_#>\-]*(yes|no)\b[\s\"'“”*_.,:;!\-–—]*", re.IGNORECASE)
_FEWEST_REASON_CHARACTERS = 12

logger = logging.getLogger(__name__)

PairQuestion = tuple[str, str, str]  # two images, relative to OUTPUT, and the question


def ask(
    asked: Iterable[PairQuestion], output: Path, judge: JudgeClient, what: str, texts: bool = False
) -> dict[PairQuestion, Any]:
    """P(Yes) of images and questions, or with ``texts`` whole answers; those without an answer have no entry.

    A file in OUTPUT/work keeps all answers, so that a killed run repeats no question. Raises PacoRewardError: the server
    gives no answers, or that file is damaged.
    """
    file = output / "work" / ("reasons.jsonl" if texts else "scores.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    form = () if texts else astuple(judge.form)
    keys = {one: json.dumps([judge.check(), *one, *form]) for one in asked}
    with file.open("a+b") as journal:
        whole, _, _ = file.read_bytes().rpartition(b"\n")  # a kill may have cut the last line off
        journal.truncate(len(whole) + bool(whole))
        try:
            known = {row["key"]: row["value"] for row in map(json.loads, whole.splitlines())}
        except (ValueError, LookupError, TypeError) as error:
            raise PacoRewardError(
                f"{file} has a damaged line ({error}); remove that line to ask again"
            ) from error
        todo, errors = [one for one, key in keys.items() if key not in known], []
        for start in tqdm(
            range(0, len(todo), _PAIRS_AT_ONCE), desc=what, unit_scale=_PAIRS_AT_ONCE
        ):
            own = todo[start : start + _PAIRS_AT_ONCE]
            pairs = [
                Pair(load_image(output / first), load_image(output / second), text)
                for first, second, text in own
            ]
            if texts:
                found = [(a.text, a.error) for a in judge.generate(pairs, REASON_TOKENS)]
            else:
                found = [(verdict.p_yes, verdict.error) for verdict in judge.score(pairs)]
            for one, (value, error) in zip(own, found, strict=True):
                if error is None:
                    known[keys[one]] = value
                    journal.write(json.dumps({"key": keys[one], "value": value}).encode() + b"\n")
            journal.flush()
            errors += [error for _, error in found if error is not None]
            if all(error is not None for _, error in found) and (
                len(own) == _PAIRS_AT_ONCE or not known
            ):
                raise PacoRewardError(
                    f"no answer to {len(own)} {what}, first: {found[0][1]}; run again to continue"
                )
    if errors:
        logger.warning(
            "no answer to %d of %d %s, first: %s; run again",
            len(errors),
            len(todo),
            what,
            errors[0],
        )
    return {one: known[key] for one, key in keys.items() if key in known}


def rank_by_scores(
    sets: Sequence[CandidateSet],
    questions: Mapping[str, str],
    output: Path,
    judge: JudgeClient,
    counts: Counter,
) -> list[Ranking]:
    """Rank the candidates of each set by a judge's P(Yes) of its folder's question on (reference, candidate).

    Sets with a missing score are left out and counted; the next run asks again.
    """

    def asked(one: CandidateSet, name: str) -> PairQuestion:
        return (
            f"images/{one.folder}/{one.ref_image}",
            f"images/{one.folder}/{name}",
            questions[one.folder],
        )

    known = ask(
        (asked(one, name) for one in sets for name in one.comp_images), output, judge, "rankings"
    )
    rankings = []
    for one in sets:
        scores = {name: known.get(asked(one, name)) for name in one.comp_images}
        if None in scores.values():
            counts["rankings_without_answer"] += 1
            continue
        ranked = sorted(scores, key=scores.get, reverse=True)
        rankings.append(
            Ranking(**dict(one), rank_images=ranked, scores=[scores[name] for name in ranked])
        )
    return rankings


def label_edits(
    pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, min_gap: float, counts: Counter
) -> list[LabeledPair]:
    """Editing pairs with a judge's labels: Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2."""
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
    pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, counts: Counter
) -> list[LabeledPair]:
    """The pairs whose written answer agrees with their label, with that answer (``Yes. Both show …``)."""
    # Wording of ours. It lets the model disagree with the verdict: the pair is then left out.
    request = (
        "This question was asked about the two images:\n\n{0.question}\n\nThe verdict that was given is: {0.verdict}. "
        'Write the answer. Begin with the word "{0.verdict}." and then give, in two to four sentences, the detailed '
        "reasons that can be seen in the two images. Do not mention that a verdict was given. If what you see clearly "
        "contradicts the verdict, begin with the verdict that you would give instead."
    )
    keys = {pair: (pair.first, pair.second, request.format(pair)) for pair in pairs}
    known = ask(keys.values(), output, judge, "reasons", texts=True)
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
        verdict, reasons = read_reason(answer) or (None, None)
        agrees = (
            "unreadable"
            if verdict is None
            else "kept"
            if verdict == pair.verdict
            else "contradicting"
        )
        counts[f"reasons_{agrees}"] += 1
        if agrees == "kept":
            kept.append(replace(pair, reason=f"{verdict}. {reasons}"))
    return kept


def read_reason(answer: str) -> tuple[str, str] | None:
    """``("Yes", "Both show …")`` of a written answer; None without a verdict or without reasons."""
    match = _VERDICT.match(answer)
    if match is None:
        return None
    reasons = " ".join(answer[match.end() :].split()).strip("*_ ")
    if len(reasons) < _FEWEST_REASON_CHARACTERS or any(
        token in reasons for token in (TAG, *RESERVED)
    ):
        return None
    return match[1].capitalize(), reasons[0].upper() + reasons[1:]
