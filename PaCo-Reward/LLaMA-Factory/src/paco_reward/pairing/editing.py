"""Editing pairs: (source, edited, instruction) rows become answers to the two editing questions.

A line of the file: ``source`` and ``edited`` (image files), ``instruction``, and the labels that are known, each Yes or No
or true or false: ``consistency`` (everything not mentioned stayed as it was), ``follows`` (the edit does what it should).
Labels that are missing are asked of a judge: Yes from P(Yes) ≥ ½ + min_gap/2, No up to ½ − min_gap/2, else left out.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paco_judge.client import JudgeError, Pair
from paco_judge.questions import editing_consistency_question, editing_instruction_question
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.pairing.chat import Progress, Server
from paco_reward.pairing.cutting import copy
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.records import LabelledPair
from paco_reward.pairing.sources import IMAGE_TAG, read_json_lines
from paco_reward.pairing.split import connected

_QUESTIONS = {
    "consistency": ("editing_consistency", editing_consistency_question),
    "follows": ("editing_instruction", editing_instruction_question),
}
_LABELS = {"yes": True, "no": False, "true": True, "false": False}
_AT_ONCE = 64


@dataclass(frozen=True)
class EditRow:
    """One edit; ``labels`` holds what is known of ``consistency`` and ``follows``."""

    place: str
    source: Path
    edited: Path
    instruction: str
    labels: dict[str, bool]


def read_edits(file: Path, has_server: bool) -> list[EditRow]:
    """All rows; images are looked for beside the file, not opened.

    Raises:
        PacoRewardError: a line lacks something, its image is missing, or it has no label and there is no server.
    """
    edits = []
    for place, row in read_json_lines(file, "editing rows"):
        edit = _edit(place, row, file.parent)
        if not edit.labels and not has_server:
            raise PacoRewardError(
                f"{place} has no label; add consistency or follows (Yes or No), or name a judge with --server"
            )
        edits.append(edit)
    return edits


def _edit(place: str, row: dict[str, Any], folder: Path) -> EditRow:
    for key in ("source", "edited", "instruction"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise PacoRewardError(f"{place} has no {key}; a row has source, edited and instruction, each a text")
    if IMAGE_TAG in row["instruction"]:
        raise PacoRewardError(f"{place}: the instruction contains {IMAGE_TAG}, which LLaMA-Factory takes for an image")
    files = [folder / row[key] for key in ("source", "edited")]
    for path in files:
        if not path.is_file():
            raise PacoRewardError(f"{place}: image {path} does not exist; paths are relative to {folder}")
    labels = {}
    for key in _QUESTIONS:
        if row.get(key) is None:
            continue
        label = _LABELS.get(str(row[key]).strip().casefold())
        if label is None:
            raise PacoRewardError(f"{place}: {key} must be Yes or No, not {row[key]!r}")
        labels[key] = label
    return EditRow(place, *files, row["instruction"].strip(), labels)


def editing_pairs(
    edits: Sequence[EditRow],
    output: Path,
    server: Server | None,
    journal: Journal,
    min_gap: float,
    counts: Counter,
) -> list[LabelledPair]:
    """A pair for every question that has an answer; images are copied to OUTPUT/editing_images under their content hash.

    ``counts`` receives ``editing_unclear`` and ``editing_without_answer`` (no score: asked again by the next run).
    """
    pairs: list[LabelledPair] = []
    unlabelled: list[LabelledPair] = []
    for edit in edits:
        first, second = (_stored(file, output) for file in (edit.source, edit.edited))
        for key, (kind, question) in _QUESTIONS.items():
            known = key in edit.labels
            pair = LabelledPair(first, second, question(edit.instruction), edit.labels.get(key, False), kind, first)
            if known:
                pairs.append(pair)
            elif server is not None:
                unlabelled.append(pair)
    if server is not None and unlabelled:
        pairs += _judged(unlabelled, output, server, journal, min_gap, counts)
    return pairs


def _stored(file: Path, output: Path) -> str:
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    name = f"editing_images/{digest}{file.suffix.lower()}"
    copy(file, output / name)
    return name


def _judged(
    pairs: Sequence[LabelledPair], output: Path, server: Server, journal: Journal, min_gap: float, counts: Counter
) -> list[LabelledPair]:
    keys = [json.dumps([server.model, pair.first, pair.second, pair.question]) for pair in pairs]
    todo = [(key, pair) for key, pair in zip(keys, pairs) if key not in journal]
    judge, progress = server.judge(), Progress("editing labels", len(todo))
    for start in range(0, len(todo), _AT_ONCE):
        part = todo[start : start + _AT_ONCE]
        asked = [Pair(open_image(output / p.first), open_image(output / p.second), p.question) for _, p in part]
        try:
            verdicts = judge.score_blocking(asked)
        except JudgeError as error:
            raise PacoRewardError(f"--server {server.url}: {error}; run the same command again to continue") from error
        for (key, _), verdict in zip(part, verdicts, strict=True):
            if verdict.ok:
                journal.add(key, verdict.p_yes)
            progress.step()
        if not any(verdict.ok for verdict in verdicts):
            raise PacoRewardError(
                f"--server {server.url}: none of {len(part)} editing questions could be scored ({verdicts[0].error}); "
                "what was answered before is saved: run the same command again to continue"
            )
    labelled = []
    for key, pair in zip(keys, pairs):
        if key not in journal:
            counts["editing_without_answer"] += 1
        elif abs(journal[key] - 0.5) < min_gap / 2:
            counts["editing_unclear"] += 1
        else:
            labelled.append(replace(pair, label=journal[key] >= 0.5))
    return labelled


def grouped_by_image(pairs: Sequence[LabelledPair], leader: dict[str, str]) -> list[LabelledPair]:
    """The pairs with the groups that train and test are split by: pairs that share an image, or a near-duplicate of one,
    directly or over others, are together."""
    groups = connected([(leader[pair.first], leader[pair.second]) for pair in pairs])
    return [replace(pair, group=pairs[group].first) for pair, group in zip(pairs, groups, strict=True)]
