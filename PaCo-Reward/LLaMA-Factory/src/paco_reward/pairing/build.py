"""The data set from beginning to end: check, cut, rank, label, clean, split, give reasons, write.

OUTPUT/
  images/<idx>/…, editing_images/…        sub-figures and edits
  prompt_data.jsonl, sets.jsonl           what was paired; consistency_full_rank.jsonl: the rankings used
  NAME_train.json, NAME_test.json, …      the data sets, with dataset_info.json
  stats.json, samples.png                 what came of it
  work/                                   answers of the server: delete to ask anew
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paco_reward.errors import PacoRewardError
from paco_reward.pairing import duplicates, pairs, split
from paco_reward.pairing.cutting import write_sub_figures
from paco_reward.pairing.editing import EditRow, editing_pairs, grouped_by_image, read_edits
from paco_reward.pairing.journal import Journal, write_atomically, write_json
from paco_reward.pairing.options import Options
from paco_reward.pairing.rankings import rank_by_order, rank_by_scores, read_rankings
from paco_reward.pairing.reasons import PairKey, Written, given_reasons, read_reasons, write_reasons
from paco_reward.pairing.records import LabelledPair, PromptItem, Ranking
from paco_reward.pairing.report import dataset_numbers, write_sheet
from paco_reward.pairing.sets import candidate_sets
from paco_reward.pairing.sharegpt import write_datasets
from paco_reward.pairing.sources import read_prompts
from paco_reward.preflight import check_images

logger = logging.getLogger(__name__)


def build(options: Options) -> dict[str, Any]:
    """Build the data set; a run that was killed continues, with what the server answered before.

    Returns:
        The statistics that stats.json holds: ``counts`` and, for each data set, its numbers.

    Raises:
        PacoRewardError: the first thing that is wrong, before anything is cut or asked; or a server that stopped.
    """
    options.check()
    items: list[PromptItem] = []
    if options.images is not None and options.metadata is not None:
        items = read_prompts(options.metadata, options.images, options.grids is not None)
    by_folder = {item.folder: item for item in items}
    edits = read_edits(options.editing, options.server is not None) if options.editing else []
    ranked = read_rankings(options.rankings, by_folder) if options.rankings else None
    written = read_reasons(options.reasons_file, by_folder) if options.reasons_file else None
    if ranked is None and items:
        _check_sets(items)
    options = _checked_server(options)
    _check_images(items, edits)
    _claim_output(options, items, edits)

    counts: Counter[str] = Counter(prompts=len(items), edits=len(edits))
    counts["sub_figures"] = write_sub_figures(items, options.output)
    datasets: dict[str, list[LabelledPair]] = {}
    if items:
        rankings = _rankings(options, items, by_folder, ranked, counts)
        if options.sets_only:
            return _finish(options, counts, datasets)
        labelled = pairs.pairs_of_rankings(
            rankings,
            by_folder,
            yes_ranks=options.yes_ranks,
            no_ranks=options.no_ranks,
            min_gap=options.min_gap,
            seed=options.seed,
            counts=counts,
        )
        decided = {item.group: item.split for item in items if item.split}
        datasets |= _datasets(options, options.name, labelled, counts, decided, written)
    if edits:
        journal = Journal(options.output / "work" / "editing.jsonl")
        labelled = editing_pairs(edits, options.output, options.server, journal, options.min_gap, counts)
        datasets |= _datasets(options, options.editing_name, labelled, counts)
    return _finish(options, counts, datasets)


def _check_sets(items: Sequence[PromptItem]) -> None:
    if any(len(item.generations) > 1 and item.rows * item.cols > 1 for item in items):
        return
    item = items[0]
    raise PacoRewardError(
        f"no prompt can be paired: it takes two generations and two panels, but {item.place} has "
        f"{len(item.generations)} of {item.rows}x{item.cols}; generate more, or give --rankings"
    )


def _checked_server(options: Options) -> Options:
    """The options with the names under which the server serves the models."""
    if options.server is None:
        return options
    server = replace(options.server, model=options.server.check())
    logger.info("server: %s serves %s", server.url, server.model)
    reason_model = options.reason_model
    if options.reasons and reason_model:
        reason_model = replace(server, model=reason_model).check()
    return replace(options, server=server, reason_model=reason_model)


def _check_images(items: Iterable[PromptItem], edits: Iterable[EditRow]) -> None:
    files = {file: item.place for item in items for file in item.files()}
    files |= {file: edit.place for edit in edits for file in (edit.source, edit.edited)}
    check_images(files)
    logger.info("images: %d files readable", len(files))


def _claim_output(options: Options, items: Sequence[PromptItem], edits: Sequence[EditRow]) -> None:
    """Note which inputs the output folder is made from; images cut from others would be taken for these.

    Raises:
        PacoRewardError: the folder cannot be made, or belongs to other inputs.
    """
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(json.dumps([item.folder, item.prompt, item.rows, item.cols, list(item.names())]).encode())
        for file in item.files():
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    record = {"prompts": len(items), "inputs": digest.hexdigest()}
    note = options.output / "work" / "inputs.json"
    try:
        if note.is_file() and json.loads(note.read_text(encoding="utf-8")) != record:
            raise PacoRewardError(
                f"{options.output} was built from other prompts or images than these; name another --output, or delete it"
            )
        write_json(note, record)
    except (OSError, ValueError) as error:
        raise PacoRewardError(f"--output {options.output} cannot be used: {error}; name another folder") from error


def _rankings(
    options: Options,
    items: Sequence[PromptItem],
    by_folder: dict[str, PromptItem],
    ranked: list[Ranking] | None,
    counts: Counter,
) -> list[Ranking]:
    """Rankings from the file, else of sets formed here (none yet with --sets_only). All are written down."""
    _write_lines(options.output / "prompt_data.jsonl", ({"idx": i.folder, "prompt": i.prompt} for i in items))
    if ranked is None:
        sets = []
        for item in items:
            own = candidate_sets(item, options.candidates, options.sets_per_prompt, options.seed)
            counts["prompts_without_sets"] += not own
            sets += own
        counts["sets"] = len(sets)
        logger.info("sets: %d of %d prompts", len(sets), len(items))
        _write_lines(options.output / "sets.jsonl", map(asdict, sets))
        if options.sets_only or options.server is None:
            return []
        rank = rank_by_scores if options.rank_by == "scores" else rank_by_order
        journal = Journal(options.output / "work" / "rankings.jsonl")
        ranked = rank(sets, by_folder, options.output, options.server, journal, counts)
    counts["rankings"] = len(ranked)
    rows = (
        {
            "folder": r.folder,
            "ref_image": r.ref_image,
            "comp_images": sorted(r.rank_images),
            "rank_images": r.rank_images,
        }
        for r in ranked
    )
    _write_lines(options.output / "consistency_full_rank.jsonl", rows)
    return ranked


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))


def _datasets(
    options: Options,
    name: str,
    labelled: Sequence[LabelledPair],
    counts: Counter,
    decided: Mapping[str, str] = MappingProxyType({}),
    written: Mapping[PairKey, Written] | None = None,
) -> dict[str, list[LabelledPair]]:
    """Clean, split, balance and shuffle labelled pairs, with reasons where they are asked for; by data set name.

    ``decided``: the split of the groups whose metadata says it. ``written``: reasons from a file.
    """
    counts["pairs_labelled"] += len(labelled)
    images = {image for pair in labelled for image in (pair.first, pair.second)}
    leader = duplicates.leaders(images, options.output, options.duplicate_bits)
    kept = duplicates.without_duplicates(split.shuffled(labelled, options.seed), leader, counts)
    if name == options.editing_name:
        kept = grouped_by_image(kept, leader)
    drawn = {pair.group for pair in kept} - set(decided)
    testing = split.test_groups(drawn, options.test_share, options.seed)
    testing |= {group for group, part in decided.items() if part == split.TEST}
    made = _parts(options, kept, testing, counts)
    everything = [*made[split.TRAIN], *made[split.TEST]]
    if written is not None:
        everything = given_reasons(everything, written, counts)
    elif options.reasons and options.server is not None:
        server = replace(options.server, model=options.reason_model or options.server.model)
        journal = Journal(options.output / "work" / "reasons.jsonl")
        everything = write_reasons(everything, options.output, server, journal, counts, options.reason_tokens)
    if written is not None or options.reasons:
        made, name = _parts(options, everything, testing, counts), f"{name}_cot"
    return {f"{name}_{part}": own for part, own in made.items() if own}


def _parts(
    options: Options, pairs: Sequence[LabelledPair], testing: set[str], counts: Counter
) -> dict[str, list[LabelledPair]]:
    """The pairs of either split, balanced."""
    parts = {}
    for part in (split.TRAIN, split.TEST):
        own = [pair for pair in pairs if (pair.group in testing) == (part == split.TEST)]
        parts[part] = split.balanced(own, options.seed)
        counts["unbalanced"] += len(own) - len(parts[part])
    return parts


def _finish(options: Options, counts: Counter, datasets: dict[str, list[LabelledPair]]) -> dict[str, Any]:
    stats = {
        "seed": options.seed,
        "counts": {name: value for name, value in counts.items() if value},
        "datasets": {name: dataset_numbers(own) for name, own in datasets.items()},
    }
    if not options.sets_only:
        if not datasets:
            raise PacoRewardError(
                f"no balanced pairs are left of {counts['pairs_labelled']} labelled ones ({_largest_loss(counts)}); add "
                "images or rankings, or loosen --min_gap, --duplicate_bits or --yes_ranks and --no_ranks"
            )
        write_datasets(options.output, datasets)
        write_sheet(options.output, datasets)
    write_json(options.output / "stats.json", stats)
    return stats


def _largest_loss(counts: Counter) -> str:
    losses = (
        "rankings_unclear",
        "pairs_disputed",
        "near_duplicate",
        "repeated",
        "repeated_disputed",
        "unbalanced",
        "reasons_contradicting",
        "reasons_missing",
    )
    return ", ".join(f"{name} {counts[name]}" for name in losses if counts[name]) or "no ranking gave any"
