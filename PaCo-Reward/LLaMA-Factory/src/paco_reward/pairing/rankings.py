"""Rankings of candidates against a reference: from a file that people made, or by a model over a server.

The file is in ConsistencyRank's form, a line per ranking: ``folder`` (the prompt's idx), ``ref_image``, ``comp_images``,
``rank_images`` (the same names, best first). Names are those of the sub-figures inside the prompt's folder; ``sets.jsonl``
of an earlier run lists them.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_judge.client import JudgeError, Pair
from paco_judge.images import png_data_url
from paco_judge.questions import theme_question
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.pairing.chat import Progress, Question, Server, ask_all
from paco_reward.pairing.journal import Journal
from paco_reward.pairing.records import CandidateSet, PromptItem, Ranking
from paco_reward.pairing.sources import read_json_lines
from paco_reward.pairing.wording import image_messages, ranking_request, read_order

_SHOWN = 5
_SETS_AT_ONCE = 16
_ORDER_TOKENS = 128


def read_rankings(file: Path, items: Mapping[str, PromptItem]) -> list[Ranking]:
    """All rankings of a file, checked against the prompts' sub-figures.

    Raises:
        PacoRewardError: a line is not a ranking, or names a folder or an image that is not there.
    """
    names = {folder: item.names() for folder, item in items.items()}
    return [_ranking(place, row, names) for place, row in read_json_lines(file, "rankings")]


def _ranking(place: str, row: dict[str, Any], names: Mapping[str, dict[str, None]]) -> Ranking:
    missing = [key for key in ("folder", "ref_image", "rank_images") if key not in row]
    if missing:
        raise PacoRewardError(f"{place} has no {missing[0]}; a ranking has folder, ref_image, comp_images, rank_images")
    ranked, reference = row["rank_images"], row["ref_image"]
    compared = row.get("comp_images", ranked)
    if not all(isinstance(value, list) and all(isinstance(n, str) for n in value) for value in (ranked, compared)):
        raise PacoRewardError(f"{place}: comp_images and rank_images must be lists of image names")
    if sorted(ranked) != sorted(compared) or len(set(ranked)) != len(ranked) or reference in ranked:
        raise PacoRewardError(
            f"{place}: rank_images {ranked} must be the comp_images {compared} in another order, each once and without "
            f"the reference {reference!r}"
        )
    if len(ranked) < 2:
        raise PacoRewardError(f"{place}: a ranking needs at least two candidates, not {len(ranked)}")
    folder = _folder(str(row["folder"]), names)
    if folder is None:
        raise PacoRewardError(
            f"{place}: folder {row['folder']} is the idx of no prompt in the metadata; known: {_listed(names)}"
        )
    for name in (reference, *ranked):
        if name not in names[folder]:
            raise PacoRewardError(
                f"{place}: image {name!r} is not a sub-figure of prompt {folder}; known: {_listed(names[folder])}"
            )
    return Ranking(folder, reference, tuple(ranked))


def _folder(name: str, known: Mapping[str, object]) -> str | None:
    """The folder by its name, or by its number: the benchmark writes 0007 and 7."""
    if name in known:
        return name
    return str(int(name)) if name.isdigit() and str(int(name)) in known else None


def _listed(names: Mapping[str, object]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return f"{shown} … ({len(names)} in all)" if len(names) > _SHOWN else shown


def rank_by_scores(
    sets: Sequence[CandidateSet],
    items: Mapping[str, PromptItem],
    output: Path,
    server: Server,
    journal: Journal,
    counts: Counter,
) -> list[Ranking]:
    """Rank each set by P(Yes) of the default question on (reference, candidate), asked of a judge.

    A set with a pair that has no score is left out and counted (``rankings_without_answer``); it is asked again by the
    next run.

    Raises:
        PacoRewardError: the server stopped answering, or no set could be scored.
    """
    keys = {candidates: _key("scores", server.model, candidates) for candidates in sets}
    todo = [candidates for candidates in sets if keys[candidates] not in journal]
    judge, progress, problem = server.judge(), Progress("rankings", len(todo)), ""
    for start in range(0, len(todo), _SETS_AT_ONCE):
        part = todo[start : start + _SETS_AT_ONCE]
        asked = [pair for candidates in part for pair in _pairs(candidates, items, output)]
        try:
            verdicts = iter(judge.score_blocking(asked))
        except JudgeError as error:
            raise PacoRewardError(f"--server {server.url}: {error}; run the same command again to continue") from error
        scored = 0
        for candidates in part:
            own = [next(verdicts) for _ in candidates.comp_images]
            if all(verdict.ok for verdict in own):
                journal.add(keys[candidates], [verdict.p_yes for verdict in own])
                scored += 1
            else:
                problem = next(verdict.error for verdict in own if not verdict.ok)
            progress.step()
        if not scored:
            raise PacoRewardError(
                f"--server {server.url}: none of {len(part)} sets could be scored ({problem}); what was answered before "
                "is saved: run the same command again to continue, or use --rank_by order for a model without "
                "log-probabilities"
            )
    return _scored(sets, keys, journal, counts)


def _scored(sets: Sequence[CandidateSet], keys: dict, journal: Journal, counts: Counter) -> list[Ranking]:
    rankings = []
    for candidates in sets:
        if keys[candidates] not in journal:
            counts["rankings_without_answer"] += 1
            continue
        scores = journal[keys[candidates]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        ranked = tuple(candidates.comp_images[index] for index in order)
        rankings.append(
            Ranking(candidates.folder, candidates.ref_image, ranked, tuple(scores[index] for index in order))
        )
    return rankings


def rank_by_order(
    sets: Sequence[CandidateSet],
    items: Mapping[str, PromptItem],
    output: Path,
    server: Server,
    journal: Journal,
    counts: Counter,
) -> list[Ranking]:
    """Ask a model for each set's order in one question with all its images.

    Answers that are not an order are left out and counted (``rankings_unreadable``), as are sets that the server refused
    (``rankings_without_answer``; asked again by the next run).

    Raises:
        PacoRewardError: the server stopped answering.
    """
    keys = {candidates: _key("order", server.model, candidates) for candidates in sets}
    questions = [
        Question(keys[candidates], lambda c=candidates: _order_messages(c, items, output))
        for candidates in sets
        if keys[candidates] not in journal
    ]
    refused = ask_all(server, questions, journal.add, "rankings", _ORDER_TOKENS)
    counts["rankings_without_answer"] += len(refused)
    rankings = []
    for candidates in sets:
        if keys[candidates] in refused:
            continue
        order = read_order(journal[keys[candidates]], len(candidates.comp_images))
        if order is None:
            counts["rankings_unreadable"] += 1
            continue
        ranked = tuple(candidates.comp_images[index] for index in order)
        rankings.append(Ranking(candidates.folder, candidates.ref_image, ranked))
    return rankings


def _key(method: str, model: str, candidates: CandidateSet) -> str:
    return json.dumps([method, model, candidates.folder, candidates.ref_image, *candidates.comp_images])


def _pairs(candidates: CandidateSet, items: Mapping[str, PromptItem], output: Path) -> list[Pair]:
    folder = output / "images" / candidates.folder
    question = theme_question(items[candidates.folder].theme)
    reference = open_image(folder / candidates.ref_image)
    return [Pair(reference, open_image(folder / name), question) for name in candidates.comp_images]


def _order_messages(candidates: CandidateSet, items: Mapping[str, PromptItem], output: Path) -> list[dict]:
    folder = output / "images" / candidates.folder
    names = (candidates.ref_image, *candidates.comp_images)
    urls = [png_data_url(open_image(folder / name)) for name in names]
    return image_messages(urls, ranking_request(items[candidates.folder].theme, len(candidates.comp_images)))
