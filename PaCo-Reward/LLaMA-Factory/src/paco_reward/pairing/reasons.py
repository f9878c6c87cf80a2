"""Reasons for a given label: written by a model over a server, or by people in a file."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paco_judge.images import png_data_url
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.pairing.chat import Question, Server, ask_all
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.pairs import with_reason
from paco_reward.pairing.records import LabelledPair, PromptItem
from paco_reward.pairing.sources import read_json_lines
from paco_reward.pairing.wording import image_messages, read_reason, reason_request

PairKey = tuple[str, str, str]  # folder and the two images' names, sorted
Written = tuple[list[str], str]  # the two names in the order that the reason speaks of, and the reason


def write_reasons(
    pairs: Sequence[LabelledPair], output: Path, server: Server, journal: Journal, counts: Counter, max_tokens: int
) -> list[LabelledPair]:
    """The pairs that got an answer in line with their label, with that answer (``Yes. Both show …``).

    Left out and counted: answers that begin with the other verdict (``reasons_contradicting``), with neither, or
    without reasons (``reasons_unreadable``), and questions that the server refused (``reasons_without_answer``; asked
    again by the next run).

    Raises:
        PacoRewardError: the server stopped answering.
    """
    keys = [
        json.dumps([server.model, pair.kind, pair.first, pair.second, pair.question, pair.verdict]) for pair in pairs
    ]
    questions = [
        Question(key, lambda p=pair: _messages(p, output)) for key, pair in zip(keys, pairs) if key not in journal
    ]
    refused = ask_all(server, questions, journal.add, "reasons", max_tokens)
    counts["reasons_without_answer"] += len(refused)
    answers = {key: journal[key] for key in keys if key not in refused}
    return _in_line([(pair, answers[key]) for pair, key in zip(pairs, keys) if key in answers], counts)


def read_reasons(file: Path, items: Mapping[str, PromptItem]) -> dict[PairKey, Written]:
    """Reasons that people wrote: lines with ``folder`` (the prompt's idx), ``images`` and ``reason``.

    ``images`` are two of its names, in the order that the reason speaks of ("the first shows …").

    Returns:
        By folder and the two names, sorted: (images, reason).

    Raises:
        PacoRewardError: a line lacks a field, names a folder or an image that is not there, or repeats another's pair.
    """
    names = {folder: item.names() for folder, item in items.items()}
    found: dict[PairKey, Written] = {}
    for place, row in read_json_lines(file, "reasons"):
        folder, images, reason = str(row.get("folder")), row.get("images"), row.get("reason")
        if not (isinstance(images, list) and len(images) == 2 and isinstance(reason, str)):
            raise PacoRewardError(f"{place}: a line has folder, images (two names) and reason (a text)")
        if folder not in names:
            raise PacoRewardError(f"{place}: folder {folder} is the idx of no prompt in the metadata")
        for name in images:
            if name not in names[folder]:
                raise PacoRewardError(f"{place}: image {name!r} is not a sub-figure of prompt {folder}")
        key = (folder, *sorted(images))
        if key in found:
            raise PacoRewardError(f"{place}: the pair {images} of {folder} has a reason before; leave one of the two")
        found[key] = images, reason
    return found


def given_reasons(
    pairs: Sequence[LabelledPair], written: Mapping[PairKey, Written], counts: Counter
) -> list[LabelledPair]:
    """The pairs that have a written reason in line with their label, shown in its order; the others are left out.

    Counted as by `write_reasons`, and ``reasons_missing``: pairs that the file does not name.
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
    return _in_line(answered, counts)


def _in_line(answered: Sequence[tuple[LabelledPair, str]], counts: Counter) -> list[LabelledPair]:
    """The pairs whose answer begins with their label, with that answer."""
    kept = []
    for pair, answer in answered:
        read = read_reason(answer)
        if read is None:
            counts["reasons_unreadable"] += 1
        elif read[0] != pair.verdict:
            counts["reasons_contradicting"] += 1
        else:
            counts["reasons_kept"] += 1
            kept.append(with_reason(pair, f"{read[0]}. {read[1]}"))
    return kept


def _messages(pair: LabelledPair, output: Path) -> list[dict]:
    urls = [png_data_url(open_image(output / name)) for name in (pair.first, pair.second)]
    return image_messages(urls, reason_request(pair.question, pair.verdict))
