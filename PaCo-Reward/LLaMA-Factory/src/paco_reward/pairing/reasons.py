"""Reasons for a given label, written by a model over a server."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paco_judge.images import png_data_url
from paco_reward.images import open_image
from paco_reward.pairing.chat import Question, Server, ask_all
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.pairs import with_reason
from paco_reward.pairing.records import LabelledPair
from paco_reward.pairing.wording import image_messages, read_reason, reason_request


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
    kept = []
    for key, pair in zip(keys, pairs):
        if key in refused:
            continue
        read = read_reason(journal[key])
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
