"""`build-dataset --mend FILE`: labels of a judge's mistakes, beside the pairs it is trained on."""

import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence

from paco_judge.errors import UserError
from paco_judge.files import read_json_rows
from paco_judge.questions import form_of
from paco_reward.datasets import Example, load_examples, pair_prefix
from paco_reward.pairing import select
from paco_reward.pairing.files import TEST, TRAIN
from paco_reward.pairing.select import LabeledPair
from paco_reward.pairing.splits import SPLIT

SUFFIX = "_mend"  # of the data sets' name
SHARE = 0.1  # of the labels, of all training pairs

logger = logging.getLogger(__name__)


def are_edits(options: Namespace) -> bool:
    """Whether the labels are about edits: they have a ``source``."""
    rows = [] if options.mend.suffix.lower() == ".csv" else read_json_rows(options.mend)
    return bool(rows) and "source" in rows[0]


def read_beside(options: Namespace) -> list[Example]:
    """The pairs that the labels come beside. Raises UserError: A data set cannot be read."""
    rows = []
    for name in map(str.strip, options.beside.split(",")):
        if name == f"{options.name}{SUFFIX}_{TRAIN}":
            raise UserError(f"{name} of --beside would be written over; choose another --name")
        examples = load_examples(options.output, name)
        if examples is None:
            raise UserError(f"data set {name} is no local ShareGPT file")
        rows += examples
    return rows


def warn_of_other_answers(
    pairs: Sequence[LabeledPair], beside: Sequence[Example], options: Namespace
) -> None:
    """Say which pairs of --beside have the other label: the judge is taught both."""
    prefix = pair_prefix(form_of(options))
    labels = {}
    for pair in pairs:
        images = (options.output / pair.first, options.output / pair.second)
        labels[images, f"{prefix}{pair.question}"] = pair.label
        if pair.kind == "pair":  # its order does not matter
            labels[images[::-1], f"{prefix}{pair.question}"] = pair.label
    differing = []
    for example in beside:
        label = labels.get((example.images, example.prompt))
        if label is not None and example.label not in (None, label):
            differing.append(example.place)
    if differing:
        logger.warning(
            "%d pairs of --beside have the other label in %s, first: %s. The judge is taught both: "
            "correct them there, too",
            len(differing),
            options.mend,
            differing[0],
        )


def kept_back(
    pairs: Sequence[LabeledPair], decided: Mapping[str, str], share: float, seed: int
) -> set[str]:
    """Groups for testing: those that were, and others while all are at most ``share`` of the pairs.

    Args:
        pairs: In groups.
        decided: TRAIN or TEST, of groups that hold labels of earlier calls.
        share: From 0 to 1.
        seed: Chooses the others.
    """
    sizes = Counter(pair.group for pair in pairs)
    testing = {group for group, part in decided.items() if part == TEST}
    left = round(share * len(pairs)) - sum(sizes[group] for group in testing)
    undecided = sizes.keys() - decided.keys()
    for group in sorted(undecided, key=lambda group: select.order_key(seed, "split", group)):
        if sizes[group] <= left:
            testing.add(group)
            left -= sizes[group]
    return testing


def parts_of(
    pairs: Sequence[LabeledPair],
    options: Namespace,
    beside: Sequence[Example],
    decided: Mapping[str, str],
    counts: Counter,
) -> Mapping[str, list[LabeledPair]]:
    """All pairs as TRAIN and TEST; those of TRAIN so often that they are SHARE of an epoch."""
    testing = kept_back(pairs, decided, options.test_share, options.seed)
    if options.test_share and not testing:
        logger.warning(
            "no labels are kept back for testing: those that share an image stay together, also "
            "with labels that an earlier call had for training (%s), and no other group is small "
            "enough; raise --test_share (%s)",
            options.output / SPLIT,
            options.test_share,
        )
    train = [pair for pair in pairs if pair.group not in testing]
    if not train:
        raise UserError(f"{options.mend} has no labels for training; see --test_share")
    repeats = max(1, round(len(beside) * SHARE / (1 - SHARE) / len(train)))
    counts["labels_for_training"] = len(train)
    counts["labels_for_testing"] = len(pairs) - len(train)
    counts["times_repeated"] = repeats
    total = len(beside) + repeats * len(train)
    num_yes = sum(pair.label for pair in train)
    logger.info(
        "%d Yes and %d No for training, each %d times: %d of the %d pairs of an epoch (%.1f %%)",
        num_yes,
        len(train) - num_yes,
        repeats,
        repeats * len(train),
        total,
        100 * repeats * len(train) / total,
    )
    return {TRAIN: train * repeats, TEST: [pair for pair in pairs if pair.group in testing]}
