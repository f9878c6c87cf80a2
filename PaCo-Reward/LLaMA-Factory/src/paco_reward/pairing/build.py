"""All steps of building a data set: check, cut, rank, label, clean, split, add reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        sub-figures and edits
  prompt_data.jsonl, sets.jsonl           what was paired; consistency_full_rank.jsonl: the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  stats.json                              numbers
  work/                                   answers of the server: delete to ask again
"""

import hashlib
import json
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from paco_judge.json_io import parse
from paco_judge.questions import Question, load_editing_questions, load_question, record
from paco_reward.datasets import pair_prefix
from paco_reward.errors import PacoRewardError
from paco_reward.pairing import answers, inputs, outputs, select
from paco_reward.pairing.options import asked_form, check, server_of
from paco_reward.pairing.records import TEST, TRAIN, LabeledPair, PromptItem, Ranking
from paco_reward.server import Server

logger = logging.getLogger(__name__)


def build(options: Namespace) -> dict[str, Any]:
    """Build the data set; a killed run resumes, with the server's earlier answers.

    Returns:
        The content of stats.json: ``counts`` and, for each data set, its numbers.

    Raises:
        PacoRewardError: A problem of options, inputs or server, before anything is cut or asked; or a server that
            stopped answering.
    """
    check(options)
    try:
        questions = tuple(load_question(name, ("theme",)) for name in options.question)
        editing = load_editing_questions(options.editing_question)
    except ValueError as error:
        raise PacoRewardError(f"--question, --editing_question: {error}") from error
    images = options.grids or options.sub_figures
    items = inputs.read_prompts(options.metadata, images, bool(options.grids)) if images else []
    by_folder = {item.folder: item for item in items}
    edits = inputs.read_edits(options.editing, bool(options.server)) if options.editing else []
    ranked = inputs.read_rankings(options.rankings, by_folder) if options.rankings else None
    written = inputs.read_reasons(options.reasons_file, by_folder) if options.reasons_file else None
    if items and ranked is None and not any(len(i.generations) > 1 and i.panels > 1 for i in items):
        raise PacoRewardError(
            f"no prompt can be paired: it takes two generations and two panels, but {items[0].place} has "
            f"{len(items[0].generations)} of {items[0].panels}; generate more, or give --rankings"
        )
    server, reason_server = server_of(options), None
    if server is not None:
        server = replace(server, model=server.check())
        logger.info("server: %s serves %s", server.url, server.model)
    if server is not None and options.reasons:
        reason_server = replace(server, model=options.reason_model or server.model)
        reason_server = replace(reason_server, model=reason_server.check())
    _claim_output(options, items)

    asked = record(tuple(dict.fromkeys(questions)) * bool(items) + editing * bool(edits), asked_form(options))
    counts: Counter[str] = Counter(prompts=len(items), edits=len(edits))
    counts["sub_figures"] = outputs.write_sub_figures(items, options.output)
    datasets: dict[str, list[LabeledPair]] = {}
    if items:
        rankings = _rankings(options, by_folder, server, ranked, counts, questions[0])
        if options.sets_only:
            return _finish(options, counts, datasets, asked)
        labeled = select.pairs_of_rankings(
            rankings,
            by_folder,
            yes_ranks=options.yes_ranks,
            no_ranks=options.no_ranks,
            min_gap=options.min_gap,
            seed=options.seed,
            counts=counts,
            questions=questions,
        )
        decided = {item.group: item.split for item in items if item.split}
        datasets |= _datasets(options, options.name, labeled, counts, reason_server, decided, written)
    if edits:
        journal = answers.Journal(options.output / "work" / "editing.jsonl")
        labeled = answers.editing_pairs(edits, options.output, server, journal, options.min_gap, counts, editing)
        datasets |= _datasets(options, options.editing_name, labeled, counts, reason_server)
    return _finish(options, counts, datasets, asked)


def _claim_output(options: Namespace, items: Sequence[PromptItem]) -> None:
    """Record the inputs of the output folder, so that sub-figures of other inputs are never reused.

    Raises:
        PacoRewardError: The folder cannot be created, or belongs to other inputs.
    """
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(json.dumps([item.folder, item.prompt, item.rows, item.cols, list(item.sources)]).encode())
        for file in item.files():
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    record = {"prompts": len(items), "inputs": digest.hexdigest()}
    note = options.output / "work" / "inputs.json"
    try:
        if note.is_file() and parse(note.read_bytes()) != record:
            raise PacoRewardError(
                f"{options.output} was built from other prompts or images; choose another --output, or delete it"
            )
        outputs.write_json(note, record)
    except (OSError, ValueError) as error:
        raise PacoRewardError(f"--output {options.output} cannot be used: {error}; choose another folder") from error


def _rankings(
    options: Namespace,
    items: Mapping[str, PromptItem],
    server: Server | None,
    ranked: list[Ranking] | None,
    counts: Counter,
    question: Question,
) -> list[Ranking]:
    """Rankings from the file, else of sets formed here (none yet with --sets_only); written to OUTPUT."""
    output = options.output
    outputs.write_lines(
        output / "prompt_data.jsonl", ({"idx": item.folder, "prompt": item.prompt} for item in items.values())
    )
    if ranked is None:
        sets = []
        for item in items.values():
            own = select.candidate_sets(item, options.candidates, options.sets_per_prompt, options.seed)
            counts["prompts_without_sets"] += not own
            sets += own
        counts["sets"] = len(sets)
        logger.info("sets: %d of %d prompts", len(sets), len(items))
        outputs.write_lines(output / "sets.jsonl", map(asdict, sets))
        if options.sets_only or server is None:
            return []
        journal = answers.Journal(output / "work" / "rankings.jsonl")
        asking = (sets, items, output, server, journal, counts)
        by_scores = options.rank_by == "scores"
        ranked = answers.rank_by_scores(*asking, question) if by_scores else answers.rank_by_order(*asking)
    counts["rankings"] = len(ranked)
    names = ("folder", "ref_image", "comp_images", "rank_images")
    rows = [dict(zip(names, (r.folder, r.ref_image, sorted(r.rank_images), r.rank_images))) for r in ranked]
    outputs.write_lines(output / "consistency_full_rank.jsonl", rows)
    return ranked


def _datasets(
    options: Namespace,
    name: str,
    labeled: Sequence[LabeledPair],
    counts: Counter,
    reason_server: Server | None,
    decided: Mapping[str, str] = MappingProxyType({}),
    written: Mapping[inputs.PairKey, inputs.Written] | None = None,
) -> dict[str, list[LabeledPair]]:
    """Clean, split, balance and shuffle labeled pairs, and add reasons; by data set name.

    Args:
        reason_server: Writes reasons.
        decided: The split of the groups whose metadata states it.
        written: Reasons from a file.
    """
    counts["pairs_labelled"] += len(labeled)
    images = {image for pair in labeled for image in (pair.first, pair.second)}
    leader = select.leaders(images, options.output, options.duplicate_bits)
    kept = select.without_duplicates(select.shuffled(labeled, options.seed), leader, counts)
    if name == options.editing_name:
        kept = select.grouped_by_image(kept, leader)
    undecided = {pair.group for pair in kept} - set(decided)
    testing = select.groups_for_testing(undecided, options.test_share, options.seed)
    testing |= {group for group, part in decided.items() if part == TEST}
    parts = _split(options, kept, testing, counts)
    everything = [*parts[TRAIN], *parts[TEST]]
    if written is not None:
        everything = answers.given_reasons(everything, written, counts)
    elif reason_server is not None:
        journal = answers.Journal(options.output / "work" / "reasons.jsonl")
        everything = answers.write_reasons(
            everything, options.output, reason_server, journal, counts, options.reason_tokens
        )
    if written is not None or reason_server is not None:
        parts, name = _split(options, everything, testing, counts), f"{name}_cot"
    return {f"{name}_{part}": own for part, own in parts.items() if own}


def _split(
    options: Namespace, pairs: Sequence[LabeledPair], testing: set[str], counts: Counter
) -> dict[str, list[LabeledPair]]:
    """The pairs of both splits, balanced."""
    parts = {}
    for part in (TRAIN, TEST):
        own = [pair for pair in pairs if (pair.group in testing) == (part == TEST)]
        parts[part] = select.balanced(own, options.seed)
        counts["unbalanced"] += len(own) - len(parts[part])
    return parts


def _finish(
    options: Namespace, counts: Counter, datasets: dict[str, list[LabeledPair]], asked: dict[str, Any]
) -> dict[str, Any]:
    stats = {
        "seed": options.seed,
        "asked": asked,
        "counts": {name: value for name, value in counts.items() if value},
        "datasets": {},
    }
    for name, pairs in datasets.items():
        yes, groups = (
            sum(pair.label for pair in pairs),
            {pair.group for pair in pairs},
        )  # groups: themes, edits' sources
        numbers = {"pairs": len(pairs), "yes": yes, "no": len(pairs) - yes}
        images = {name for pair in pairs for name in (pair.first, pair.second)}
        stats["datasets"][name] = numbers | {"images": len(images), "groups": len(groups)}
    if not options.sets_only:
        if not datasets:
            lost = ", ".join(f"{name} {value}" for name, value in stats["counts"].items())
            raise PacoRewardError(
                f"no balanced pairs are left ({lost}); add images or rankings, or loosen --min_gap, --duplicate_bits or "
                "--yes_ranks and --no_ranks"
            )
        outputs.write_datasets(options.output, datasets, pair_prefix(asked_form(options)))
    outputs.write_json(options.output / "stats.json", stats)
    return stats
