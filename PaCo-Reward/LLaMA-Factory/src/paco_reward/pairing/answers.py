"""A model's answers over a server: P(Yes) for rankings and edits, reasons. Each is journaled as it arrives."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paco_judge.client import JudgeClient, Pair
from paco_judge.images import load_image
from paco_judge.questions import Question
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.inputs import PromptItem, Ranking, ReasonRow
from paco_reward.pairing.select import CandidateSet, LabeledPair

REASON_TOKENS = 256
_PAIRS_AT_ONCE = 64
_VERDICT = re.compile(r"^[\s\"'“”*_#>\-]*(yes|no)\b[\s\"'“”*_.,:;!\-–—]*", re.IGNORECASE)
_FEWEST_REASON_CHARACTERS = 12


class Journal:
    """A file of ``{"key": …, "value": …}`` lines, so that a killed run repeats no question.

    A damaged line counts as a question without answer.
    """

    def __init__(self, file: Path) -> None:
        self.values: dict[str, Any] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for line in text.split("\n"):
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                self.values[row["key"]] = row["value"]
        self._file = file.open("a", encoding="utf-8")
        if text and not text.endswith("\n"):
            self._file.write("\n")  # a kill cut the last line off

    def add(self, key: str, value: Any) -> None:
        """Keep an answer; it is in the file when this returns."""
        self.values[key] = value
        self._file.write(json.dumps({"key": key, "value": value}) + "\n")
        self._file.flush()


Asked = tuple[str, str, str]  # two images, relative to OUTPUT, and the question


def ask(asked: Iterable[Asked], output: Path, judge: JudgeClient, what: str, texts: bool = False) -> dict[Asked, Any]:
    """P(Yes) of images and questions, or with ``texts`` whole answers; those without an answer have no entry.

    They come from the journal or from the server. Raises PacoRewardError: The server gives no answers.
    """
    journal = Journal(output / "work" / ("reasons.jsonl" if texts else "scores.jsonl"))
    form = () if texts else astuple(judge.form)
    keys = {one: json.dumps([judge.check(), *one, *form]) for one in asked}
    todo = [one for one, key in keys.items() if key not in journal.values]
    with tqdm(total=len(todo), desc=what) as bar:
        for start in range(0, len(todo), _PAIRS_AT_ONCE):
            own = todo[start : start + _PAIRS_AT_ONCE]
            pairs = [Pair(load_image(output / first), load_image(output / second), text) for first, second, text in own]
            if texts:
                found = judge.write_blocking(pairs, REASON_TOKENS)
            else:
                found = [(verdict.p_yes, verdict.error) for verdict in judge.score_blocking(pairs)]
            for one, (value, error) in zip(own, found, strict=True):
                if error is None:
                    journal.add(keys[one], value)
            bar.update(len(own))
            if all(error is not None for _, error in found) and (len(own) == _PAIRS_AT_ONCE or not journal.values):
                raise PacoRewardError(f"no answer to {len(own)} {what}, first: {found[0][1]}; run again to continue")
    return {one: journal.values[key] for one, key in keys.items() if key in journal.values}


def rank_by_scores(
    sets: Sequence[CandidateSet],
    items: Mapping[str, PromptItem],
    output: Path,
    judge: JudgeClient,
    counts: Counter,
    question: Question,
) -> list[Ranking]:
    """Rank the candidates of each set by a judge's P(Yes) of ``question`` on (reference, candidate).

    Sets with a missing score are left out and counted (``rankings_without_answer``); the next run asks again.
    """
    asked = {}
    for one in sets:
        folder, text = f"images/{one.folder}/", question.text(theme=items[one.folder].theme)
        asked[one] = {name: (folder + one.ref_image, folder + name, text) for name in one.comp_images}
    known = ask([key for keys in asked.values() for key in keys.values()], output, judge, "rankings")
    rankings = []
    for one, keys in asked.items():
        scores = {name: known[key] for name, key in keys.items() if key in known}
        if len(scores) < len(keys):
            counts["rankings_without_answer"] += 1
            continue
        ranked = sorted(scores, key=lambda name: -scores[name])
        numbers = [scores[name] for name in ranked]
        rankings.append(Ranking(folder=one.folder, ref_image=one.ref_image, rank_images=ranked, scores=numbers))
    return rankings


def label_edits(
    pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, min_gap: float, counts: Counter
) -> list[LabeledPair]:
    """Editing pairs with a judge's labels: Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2.

    ``counts`` receives ``editing_unclear`` (in between) and ``editing_without_answer`` (no score; the next run asks
    again).
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


def write_reasons(pairs: Sequence[LabeledPair], output: Path, judge: JudgeClient, counts: Counter) -> list[LabeledPair]:
    """The pairs whose written answer agrees with their label, with that answer (``Yes. Both show …``).

    Left out and counted: answers with the other verdict (``reasons_contradicting``), without verdict or reasons
    (``reasons_unreadable``), and questions without an answer (``reasons_without_answer``; the next run asks again).
    """
    keys = {pair: (pair.first, pair.second, _reason_request(pair)) for pair in pairs}
    known = ask(keys.values(), output, judge, "reasons", texts=True)
    answered = [(pair, known[key]) for pair, key in keys.items() if key in known]
    counts["reasons_without_answer"] += len(keys) - len(answered)
    return _agreeing(answered, counts)


def given_reasons(
    pairs: Sequence[LabeledPair], written: Mapping[frozenset[str], ReasonRow], counts: Counter
) -> list[LabeledPair]:
    """The pairs whose human-written reason agrees with their label, in its image order.

    Counted as by ``write_reasons``, and ``reasons_missing``: pairs without a written reason.
    """
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
        agrees = "unreadable" if verdict is None else "kept" if verdict == pair.verdict else "contradicting"
        counts[f"reasons_{agrees}"] += 1
        if agrees == "kept":
            kept.append(replace(pair, reason=f"{verdict}. {reasons}"))
    return kept


def _reason_request(pair: LabeledPair) -> str:
    """Wording of ours. It lets the model disagree with the verdict: the pair is then left out."""
    return (
        f"This question was asked about the two images:\n\n{pair.question}\n\nThe verdict that was given is: "
        f'{pair.verdict}. Write the answer. Begin with the word "{pair.verdict}." and then give, in two to four '
        "sentences, the detailed reasons that can be seen in the two images. Do not mention that a verdict was given. If "
        "what you see clearly contradicts the verdict, begin with the verdict that you would give instead."
    )


def read_reason(answer: str) -> tuple[str, str] | None:
    """(verdict, reasons) of a written answer: ``("Yes", "Both show …")``; None without a verdict or without reasons."""
    match = _VERDICT.match(answer)
    if match is None:
        return None
    reasons = " ".join(answer[match.end() :].split()).strip("*_ ")
    if len(reasons) < _FEWEST_REASON_CHARACTERS or any(token in reasons for token in (TAG, *RESERVED)):
        return None
    return match[1].capitalize(), reasons[0].upper() + reasons[1:]
