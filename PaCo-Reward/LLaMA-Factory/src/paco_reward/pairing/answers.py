"""A model's answers over a server: rankings, labels of edits, reasons. Each is journaled as it arrives."""

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from paco_judge.client import Pair
from paco_judge.images import data_url, load_image
from paco_judge.json_io import DamagedJson, parse_object
from paco_judge.questions import EDITING, Question
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError, writing
from paco_reward.pairing.inputs import PairKey, Written
from paco_reward.pairing.outputs import copy
from paco_reward.pairing.records import CandidateSet, EditRow, LabeledPair, PromptItem, Ranking
from paco_reward.server import Server, ask_all, progress

_PAIRS_AT_ONCE = 64
_ORDER_TOKENS = 128
_VERDICT = re.compile(r"^[\s\"'“”*_#>\-]*(yes|no)\b[\s\"'“”*_.,:;!\-–—]*", re.IGNORECASE)
_ORDER = re.compile(r"\d+(?:\s*>\s*\d+)+")
_FEWEST_REASON_CHARACTERS = 12


class Journal:
    """A file of ``{"key": …, "value": …}`` lines, so that a killed run repeats no question.

    A line that was cut off by a kill is removed when the file is opened.

    Raises:
        PacoRewardError: A complete line is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.values: dict[str, Any] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        raw = file.read_bytes() if file.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = parse_object(line)
                self.values.setdefault(_checked(row["key"], str), _checked(row["value"], (str, float, int)))
            except (DamagedJson, KeyError) as error:
                raise PacoRewardError(f"{file} line {number} is damaged ({error}); remove this line") from error
        self._file = file
        if len(whole) != len(raw):
            file.write_bytes(whole)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def add(self, key: str, value: Any) -> None:
        """Keep the first answer to a question; it is in the file when this returns."""
        if key in self.values:
            return
        line = (json.dumps({"key": key, "value": value}, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        with writing(self._file), self._file.open("ab", buffering=0) as file:
            end = file.seek(0, 2)
            if file.write(line) < len(line):  # the disk is nearly full
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.values[key] = value


def _checked(value: Any, kind: type | tuple[type, ...]) -> Any:
    """A text, or P(Yes) in [0, 1]. Raises DamagedJson."""
    if not isinstance(value, kind) or isinstance(value, bool) or (not isinstance(value, str) and not 0 <= value <= 1):
        raise DamagedJson(f"it holds {str(value)[:40]!r}")
    return value


def rank_by_scores(
    sets: Sequence[CandidateSet],
    items: Mapping[str, PromptItem],
    output: Path,
    server: Server,
    journal: Journal,
    counts: Counter,
    question: Question,
) -> list[Ranking]:
    """Rank the candidates of each set by a judge's P(Yes) of ``question`` on (reference, candidate).

    Sets with a missing score are left out and counted (``rankings_without_answer``); the next run asks again.

    Raises:
        PacoRewardError: The server stopped answering, or gives no scores.
    """
    # Answers to other questions, or in another form, are not reused.
    asked = [question.template] * (question.name != "theme") + _form_key(server)

    def key(candidates: CandidateSet, name: str) -> str:
        return json.dumps(["scores", server.model, candidates.folder, candidates.ref_image, name, *asked])

    def pair(candidates: CandidateSet, name: str) -> Pair:
        folder = output / "images" / candidates.folder
        text = question.text(theme=items[candidates.folder].theme)
        return Pair(load_image(folder / candidates.ref_image), load_image(folder / name), text)

    pairs = {key(c, name): partial(pair, c, name) for c in sets for name in c.comp_images}
    _score(server, journal, pairs, "rankings", ", or use --rank_by order for a model without log-probabilities")
    rankings = []
    for candidates in sets:
        found = {name: journal.values.get(key(candidates, name)) for name in candidates.comp_images}
        if None in found.values():
            counts["rankings_without_answer"] += 1
            continue
        ranked = sorted(found, key=lambda name: -found[name])
        scores = tuple(found[name] for name in ranked)
        rankings.append(Ranking(candidates.folder, candidates.ref_image, tuple(ranked), scores))
    return rankings


def rank_by_order(
    sets: Sequence[CandidateSet],
    items: Mapping[str, PromptItem],
    output: Path,
    server: Server,
    journal: Journal,
    counts: Counter,
) -> list[Ranking]:
    """Rank the candidates of each set with one question about all images, answered with an order.

    Left out and counted: sets without an answer (``rankings_without_answer``; the next run asks again), and answers
    without an order (``rankings_unreadable``).

    Raises:
        PacoRewardError: The server stopped answering.
    """

    def messages(candidates: CandidateSet) -> list[dict]:
        folder, text = (
            output / "images" / candidates.folder,
            _ranking_request(items[candidates.folder].theme, candidates),
        )
        return _messages([folder / name for name in (candidates.ref_image, *candidates.comp_images)], text)

    keys = {json.dumps(["order", server.model, c.folder, c.ref_image, *c.comp_images]): c for c in sets}
    todo = {key: partial(messages, candidates) for key, candidates in keys.items() if key not in journal}
    ask_all(server, todo, journal.add, "rankings", _ORDER_TOKENS)
    rankings = []
    for key, candidates in keys.items():
        order = read_order(journal[key], len(candidates.comp_images)) if key in journal else None
        if order is None:
            counts["rankings_unreadable" if key in journal else "rankings_without_answer"] += 1
        else:
            ranked = tuple(candidates.comp_images[index] for index in order)
            rankings.append(Ranking(candidates.folder, candidates.ref_image, ranked))
    return rankings


def _form_key(server: Server) -> list[str | None]:
    """The form of the requests, where it is not the default one."""
    return [] if server.form == Server.form else list(astuple(server.form))


def _score(
    server: Server, journal: Journal, pairs: Mapping[str, Callable[[], Pair]], what: str, hint: str = ""
) -> None:
    """Journal P(Yes) of the pairs that have none yet; a pair without a score gets no entry."""
    todo = [key for key in pairs if key not in journal]
    bar = progress(what, len(todo))
    for start in range(0, len(todo), _PAIRS_AT_ONCE):
        keys = todo[start : start + _PAIRS_AT_ONCE]
        verdicts = server.score([pairs[key]() for key in keys])
        for key, verdict in zip(keys, verdicts, strict=True):
            if verdict.ok:
                journal.add(key, verdict.p_yes)
        bar.update(len(keys))
        if not any(verdict.ok for verdict in verdicts):
            raise PacoRewardError(
                f"--server {server.url}: none of {len(keys)} {what} has a score ({verdicts[0].error}); earlier answers "
                f"are saved: run the same command again to continue{hint}"
            )


def editing_pairs(
    edits: Sequence[EditRow],
    output: Path,
    server: Server | None,
    journal: Journal,
    min_gap: float,
    counts: Counter,
    questions: Sequence[Question],
) -> list[LabeledPair]:
    """A labeled pair for each question on each edit: is the rest kept; is the instruction followed.

    Images are copied to OUTPUT/editing_images by content hash.

    Missing labels come from a judge: Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2. ``counts`` receives
    ``editing_unclear`` (in between) and ``editing_without_answer`` (no score; the next run asks again).

    Raises:
        PacoRewardError: The server stopped answering, or gives no scores.
    """
    pairs: list[LabeledPair] = []
    unlabeled: list[tuple[str, LabeledPair]] = []
    for edit in edits:
        first, second = (_store(file, output) for file in (edit.source, edit.edited))
        for name, kind, question in zip(("consistency", "follows"), EDITING, questions, strict=False):
            text = question.text(instruction=edit.instruction.strip())
            pair = LabeledPair(first, second, text, edit.labels.get(name, False), kind, first)
            if name in edit.labels:
                pairs.append(pair)
            elif server is not None:
                unlabeled.append((json.dumps([server.model, first, second, text, *_form_key(server)]), pair))
    if server is None or not unlabeled:
        return pairs

    def shown(pair: LabeledPair) -> Pair:
        return Pair(load_image(output / pair.first), load_image(output / pair.second), pair.question)

    _score(server, journal, {key: partial(shown, pair) for key, pair in unlabeled}, "editing labels")
    for key, pair in unlabeled:
        if key not in journal:
            counts["editing_without_answer"] += 1
        elif abs(journal[key] - 0.5) < min_gap / 2:
            counts["editing_unclear"] += 1
        else:
            pairs.append(replace(pair, label=journal[key] >= 0.5))
    return pairs


def _store(file: Path, output: Path) -> str:
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    name = f"editing_images/{digest}{file.suffix.lower()}"
    copy(file, output / name)
    return name


def write_reasons(
    pairs: Sequence[LabeledPair], output: Path, server: Server, journal: Journal, counts: Counter, max_tokens: int
) -> list[LabeledPair]:
    """The pairs whose written answer agrees with their label, with that answer (``Yes. Both show …``).

    Left out and counted: answers with the other verdict (``reasons_contradicting``), without verdict or reasons
    (``reasons_unreadable``), and questions that the server refused (``reasons_without_answer``; the next run asks
    again).

    Raises:
        PacoRewardError: The server stopped answering.
    """
    keys = {
        pair: json.dumps([server.model, pair.kind, pair.first, pair.second, pair.question, pair.verdict])
        for pair in pairs
    }

    def messages(pair: LabeledPair) -> list[dict]:
        return _messages([output / pair.first, output / pair.second], _reason_request(pair.question, pair.verdict))

    questions = {key: partial(messages, pair) for pair, key in keys.items() if key not in journal}
    refused = ask_all(server, questions, journal.add, "reasons", max_tokens)
    counts["reasons_without_answer"] += len(refused)
    return _agreeing([(pair, journal[key]) for pair, key in keys.items() if key not in refused], counts)


def given_reasons(
    pairs: Sequence[LabeledPair], written: Mapping[PairKey, Written], counts: Counter
) -> list[LabeledPair]:
    """The pairs whose human-written reason agrees with their label, in its image order.

    Counted as by ``write_reasons``, and ``reasons_missing``: pairs without a written reason.
    """
    answered = []
    for pair in pairs:
        folder = Path(pair.first).parts[1]  # images/<idx>/<name>
        prefix = f"images/{folder}/"
        key = (folder, *sorted(name.removeprefix(prefix) for name in (pair.first, pair.second)))
        if key not in written:
            counts["reasons_missing"] += 1
            continue
        (first, second), reason = written[key]
        answered.append((replace(pair, first=prefix + first, second=prefix + second), reason))
    return _agreeing(answered, counts)


def _agreeing(answered: Sequence[tuple[LabeledPair, str]], counts: Counter) -> list[LabeledPair]:
    kept = []
    for pair, answer in answered:
        read = read_reason(answer)
        if read is None:
            counts["reasons_unreadable"] += 1
        elif read[0] != pair.verdict:
            counts["reasons_contradicting"] += 1
        else:
            counts["reasons_kept"] += 1
            kept.append(replace(pair, reason=f"{read[0]}. {read[1]}"))
    return kept


# Wording of ours.


def _messages(files: Sequence[Path], text: str) -> list[dict]:
    images = [{"type": "image_url", "image_url": {"url": data_url(load_image(file))}} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def _ranking_request(theme: str, candidates: CandidateSet) -> str:
    """Asked with the reference first, then the candidates."""
    count = len(candidates.comp_images)
    return (
        f"The first image is a reference. The {count} images after it are candidates, numbered 1 to {count} "
        f'in this order. All were generated based on the theme: "{theme}". Rank the candidates by how well each '
        "maintains consistency with the reference in terms of style, logic and identity, the best first. Answer with "
        'all numbers separated by ">" and nothing else, in the form: best > … > worst.'
    )


def read_order(answer: str, candidates: int) -> tuple[int, ...] | None:
    """The last order in an answer such as ``2 > 1 > 3``, as indices from 0, best first; None without a complete one."""
    for found in reversed(_ORDER.findall(answer)):
        order = tuple(int(number) - 1 for number in re.findall(r"\d+", found))
        if sorted(order) == list(range(candidates)):
            return order
    return None


def _reason_request(question: str, verdict: str) -> str:
    """Lets the model disagree with the verdict: the pair is then left out."""
    return (
        f"This question was asked about the two images:\n\n{question}\n\nThe verdict that was given is: {verdict}. "
        f'Write the answer. Begin with the word "{verdict}." and then give, in two to four sentences, the detailed '
        "reasons that can be seen in the two images. Do not mention that a verdict was given. If what you see clearly "
        "contradicts the verdict, begin with the verdict that you would give instead."
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
