"""`paco-reward suspects`: the pairs of a run's pictures whose labels would teach its judge most.

A fifth of them from each of ``REASONS``. FILE has the columns of `build-dataset --pairs`, or of
`--editing` for an editor, and ``chosen_by`` and ``p_yes``. Its pictures are in a folder beside it.
"""

import argparse
import itertools
import logging
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from paco_judge.client import JudgeClient
from paco_judge.encoders import OPEN_CLIP, Encoder, local_encoder
from paco_judge.errors import UserError
from paco_judge.files import read_json_lines, write_json_lines
from paco_judge.grid import PromptLayoutError, index_pairs, split_image, split_prompt
from paco_judge.images import content_digest, encode, load_image
from paco_judge.questions import (
    EDITING,
    Question,
    add_form_arguments,
    form_of,
    load_editing_questions,
    load_question,
)
from paco_judge.verdict import Verdict, editing_score
from paco_reward.options import MAX_CONCURRENCY, positive
from paco_reward.pairing import answers
from paco_reward.pairing.files import write_image
from paco_reward.pairing.select import leaders, order_key

HELP = """Writes the pairs of a run's saved pictures whose labels would teach its judge most. It asks
the judge about pairs of panels, of panels of two pictures of an open prompt, or of an original and
its edit. The same command resumes a stopped one."""
UNSURE = "P(Yes) near 0.5"
ORDERS = "the two orders disagree"
QUESTIONS = "the two questions disagree"
RISE = "the picture's score rose most"
HIGHEST = "highest P(Yes)"
FAR_APART = "highest P(Yes), features far apart"
REASONS = (UNSURE, ORDERS, QUESTIONS, RISE, HIGHEST)
REWARDS = ("consistency_score", "consistency_for_editing")  # whose rise counts
_ASKED_FOR_EACH = 10  # pairs asked about, for each that is wanted
_ENCODED_FOR_EACH = 10  # pairs whose features are compared, for each that is wanted by them
_DUPLICATE_BITS = 4  # as build-dataset's default

logger = logging.getLogger(__name__)


class Panel(NamedTuple):
    """A panel of a saved grid, or a whole picture: a grid of one."""

    file: Path
    rows: int = 1
    cols: int = 1
    number: int = 0  # row-major

    def cut(self) -> Image.Image:
        """Its pixels. Raises ValueError."""
        return _panels(self.file, self.rows, self.cols)[self.number]


@lru_cache(maxsize=4)  # the pairs of a grid come one after the other
def _panels(file: Path, rows: int, cols: int) -> list[Image.Image]:
    return split_image(load_image(file), rows, cols)


@dataclass(eq=False)
class Suspect:
    """A pair that a person may be asked about."""

    prompt: tuple  # which one
    about: str  # theme, or instruction of the edit
    panels: tuple[Panel, Panel]
    rise: float | None = None  # of the picture's score since the run's first evaluation
    images: tuple[str, str] = ("", "")  # files of the panels
    p_yes: float = math.nan
    worth: dict[str, float] = field(default_factory=dict)  # by reason, as far as it is known


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `suspects` to the command line."""
    text = "choose the pairs of a run's pictures whose labels would teach its judge most"
    parser = commands.add_parser("suspects", help=text, description=HELP)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, with eval/epoch_*")
    add("--n", type=positive, default=100, metavar="N", help="pairs (default %(default)s)")
    add("--output", type=Path, required=True, metavar="FILE", help="new .jsonl file of pairs")
    add("--server", required=True, metavar="URL", help="of the run's judge: http://127.0.0.1:8000")
    add("--model", help="served name (default: PaCo-Reward-7B, or the server's only model)")
    add(
        "--question",
        nargs="+",
        metavar="NAME|FILE",
        help="the run's question, and another that should have the same answer (default: theme and "
        f"pair; for an editor {' and '.join(EDITING)})",
    )
    add(
        "--reward",
        metavar="NAME",
        help=f"whose rise since the first evaluation counts (default: {' or '.join(REWARDS)})",
    )
    add(
        "--asked",
        type=positive,
        metavar="N",
        help=f"pairs asked about, at most (default: {_ASKED_FOR_EACH} for each that is wanted)",
    )
    add("--seed", type=int, default=42, help="decides which these are (default %(default)s)")
    add(
        "--continue_unknown",
        action="store_true",
        help="also use earlier answers of which it is unknown whether this judge gave them",
    )
    add_form_arguments(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Ask, choose and write; returns exit status 0."""
    if args.output.suffix != ".jsonl" or args.output.exists():
        raise UserError(f"--output {args.output} must be the name of a new .jsonl file")
    suspects, is_editor = read_run(args.run, args.reward)
    questions = questions_about(args.question, is_editor)
    client = JudgeClient(
        args.server, args.model, max_concurrency=MAX_CONCURRENCY, form=form_of(args)
    )
    client.check()
    judge = answers.Judge(client, args.continue_unknown)
    candidates = spread(suspects, args.asked or _ASKED_FOR_EACH * args.n, args.seed)
    folder = args.output.with_suffix("")
    suspects = without_duplicates(candidates, folder, is_editor)
    encoder = local_encoder()
    if encoder is None:
        logger.warning(
            "no weights of CLIP (%s) or DreamSim are on this machine: which pairs with a high "
            "P(Yes) have features far apart is not known",
            OPEN_CLIP,
        )
    ask(suspects, questions, folder, judge, is_editor)
    suspects = [suspect for suspect in suspects if suspect.worth]
    if encoder is not None:
        compare_features(suspects, encoder, folder, args.n)
    chosen = choose(suspects, args.n)
    is_themed = "theme" in questions[0].fields
    rows = []
    counts: Counter[str] = Counter()  # by reason
    prompts = set()
    pictures: set[str] = set()
    for suspect, reason in chosen:
        rows.append(_row(suspect, reason, folder, is_editor, is_themed))
        counts[reason] += 1
        prompts.add(suspect.prompt)
        pictures.update(suspect.images)
    write_json_lines(args.output, rows)
    # Of what this command wrote, the rest goes; the folder may also hold other people's pictures.
    for suspect in candidates:
        for name in set(suspect.images) - pictures:
            (folder / name).unlink(missing_ok=True)
    for reason, count in counts.items():
        print(f"{count:>6}  {reason}")
    print(f"{len(rows)} pairs of {len(prompts)} prompts: {args.output}")
    option = "--editing" if is_editor else "--pairs"
    print(shlex.join(["paco-reward", "rank", option, str(args.output), "--output", "labeled"]))
    return 0


def read_run(folder: Path, reward: str | None = None) -> tuple[list[Suspect], bool]:
    """All pairs of the last evaluation's pictures, and whether they are edits.

    Raises UserError: It has no saved pictures, or none of them can be compared.
    """
    # epoch_0010_keep is the user's own.
    evaluations = sorted(
        (folder / "eval").glob("epoch_*[0-9]/eval_data.jsonl"),
        key=lambda file: (len(file.parent.name), file),
    )
    if not evaluations:
        raise UserError(f"{folder} has no eval/epoch_*/eval_data.jsonl: name the folder of a run")
    *_, last = evaluations
    rows = [row for row in read_json_lines(last) if row["file"]]
    if not rows:
        raise UserError(
            f"{last.parent} has no pictures: evaluate with config.test.save_eval_images=True"
        )
    earlier = read_json_lines(evaluations[0]) if len(evaluations) > 1 else []
    first_scores = {(row["item_id"], row["seed"]): row["rewards"] for row in earlier}
    rises = {}
    for row in rows:
        before = first_scores.get((row["item_id"], row["seed"]), {})
        rises[row["file"]] = _rise(before, row["rewards"], reward)
    if set(rises.values()) == {None}:
        wanted = reward or " or ".join(REWARDS)
        logger.warning("no pair is chosen by its rise: two evaluations with %s are needed", wanted)
    is_editor = any(row["reference"] for row in rows)
    suspects = []
    if is_editor:
        for row in rows:
            if row["reference"]:
                panels = (Panel(last.parent / row["reference"]), Panel(last.parent / row["file"]))
                prompt = (row["item_id"],)
                suspects.append(Suspect(prompt, row["prompt"], panels, rises[row["file"]]))
    else:
        suspects = _panel_pairs(rows, rises, last.parent)
    if not suspects:
        raise UserError(f"the prompts of {last} have no panels that can be compared")
    print(f"{last.parent}: {len(rows)} pictures, {len(suspects)} pairs")
    return suspects, is_editor


def _rise(
    before: Mapping[str, float | None], now: Mapping[str, float | None], reward: str | None
) -> float | None:
    for name in [reward] if reward else REWARDS:
        earlier = before.get(name)
        later = now.get(name)
        if earlier is not None and later is not None:
            return later - earlier
    return None


def _panel_pairs(
    rows: Sequence[Mapping[str, Any]], rises: Mapping[str, float | None], folder: Path
) -> list[Suspect]:
    """Pairs of panels of each grid, and of one grid and the next of an open prompt."""
    suspects = []
    before: dict[tuple, list[Panel]] = {}  # an open prompt's last grid
    places: dict[int, Any] = {}
    for row in rows:
        try:
            grid = split_prompt(row["prompt"])
        except PromptLayoutError:
            continue
        if grid.rows * grid.cols == 1:
            continue
        file = folder / row["file"]
        count = grid.rows * grid.cols
        panels = [Panel(file, grid.rows, grid.cols, number) for number in range(count)]
        prompt = (row["item_id"],)
        for i, j in index_pairs(count):
            pair = (panels[i], panels[j])
            suspects.append(Suspect(prompt, grid.theme, pair, rises[row["file"]]))
        if row["open"]:
            # As the reward between_images: two different panels, as those of a place look alike.
            cycle = places.setdefault(
                count, itertools.cycle(itertools.permutations(range(count), 2))
            )
            if prompt in before:
                place, other = next(cycle)
                pair = (before[prompt][place], panels[other])
                suspects.append(Suspect(prompt, grid.theme, pair))
            before[prompt] = panels
    return suspects


def questions_about(names: Sequence[str] | None, is_editor: bool) -> tuple[Question, ...]:
    """One question or two. Raises ValueError."""
    if is_editor:
        return load_editing_questions(names or EDITING)
    if names and len(names) > 2:
        raise UserError(f"--question takes one question or two, not {len(names)}")
    return tuple(load_question(name, ("theme",)) for name in names or ("theme", "pair"))


def spread(suspects: Sequence[Suspect], count: int, seed: int) -> list[Suspect]:
    """Up to ``count``, equally many of each prompt, chosen by the seed; order is kept."""
    numbers: dict[tuple, int] = {}
    order: dict[int, tuple] = {}  # by place in ``suspects``

    def shuffle_key(place: int) -> bytes:
        return order_key(seed, suspects[place].prompt, *suspects[place].panels)

    for place in sorted(range(len(suspects)), key=shuffle_key):
        prompt = suspects[place].prompt
        numbers[prompt] = numbers.get(prompt, 0) + 1
        order[place] = (numbers[prompt], shuffle_key(place))
    taken = sorted(order, key=order.__getitem__)[:count]
    return [suspects[place] for place in sorted(taken)]


def without_duplicates(suspects: Sequence[Suspect], folder: Path, is_editor: bool) -> list[Suspect]:
    """Those that show something of their own, with their ``images`` in ``folder``.

    A pair of two near-duplicates says nothing about consistency, but an edit may be small.
    """
    names: list[str] = []
    for suspect in suspects:
        suspect.images = (_stored(suspect.panels[0], folder), _stored(suspect.panels[1], folder))
        names += suspect.images
    leader = leaders(names, folder, _DUPLICATE_BITS)
    different: dict[tuple, Suspect] = {}
    for suspect in suspects:
        first, second = suspect.images
        shown = (leader[first], leader[second])
        if is_editor:
            different.setdefault((shown, suspect.about), suspect)
        elif shown[0] != shown[1]:
            different.setdefault(tuple(sorted(shown)), suspect)
    if not different:
        raise UserError("all pictures are near-duplicates of each other: the run has collapsed")
    return list(different.values())


def _stored(panel: Panel, folder: Path) -> str:
    """The file of a panel in ``folder``, by its content: earlier answers are about it alone."""
    image = panel.cut()
    name = f"{content_digest(image).hex()[:16]}.png"
    if not (folder / name).exists():
        write_image(folder / name, encode(image))
    return name


def ask(
    suspects: Sequence[Suspect],
    questions: Sequence[Question],
    folder: Path,
    judge: answers.Judge,
    is_editor: bool,
) -> None:
    """Set ``p_yes`` and ``worth`` of the pairs that have all answers. Raises UserError."""
    field_name = "instruction" if is_editor else "theme"
    asked: list[dict[str, answers.PairQuestion]] = []
    all_questions: list[answers.PairQuestion] = []
    for suspect in suspects:
        texts = [question.text(**{field_name: suspect.about.strip()}) for question in questions]
        first, second = suspect.images
        of_pair = {"first": (first, second, texts[0])}
        if not is_editor:  # the reverse of an edit is another one
            of_pair["turned"] = (second, first, texts[0])
        if len(texts) == 2:
            of_pair["other"] = (first, second, texts[1])
        asked.append(of_pair)
        all_questions += of_pair.values()
    print(f"{len(set(all_questions))} questions about {len(suspects)} pairs", flush=True)
    known = answers.ask(all_questions, folder, judge, "questions")
    for suspect, of_pair in zip(suspects, asked, strict=True):
        p_yes = {name: known.get(question) for name, question in of_pair.items()}
        if None in p_yes.values():
            continue
        suspect.p_yes = first = p_yes["first"]
        if is_editor and "other" in p_yes:
            suspect.p_yes = editing_score(Verdict(first), Verdict(p_yes["other"]))
        suspect.worth = {UNSURE: -abs(suspect.p_yes - 0.5), HIGHEST: suspect.p_yes}
        if "turned" in p_yes:
            suspect.worth[ORDERS] = abs(first - p_yes["turned"])
        if "other" in p_yes:
            suspect.worth[QUESTIONS] = abs(first - p_yes["other"])
        if suspect.rise is not None:
            suspect.worth[RISE] = suspect.rise


def compare_features(
    suspects: Sequence[Suspect], encoder: Encoder, folder: Path, count: int
) -> None:
    """Replace HIGHEST by FAR_APART: P(Yes) · (1 − cosine), of the pairs with the highest P(Yes)."""
    by_p_yes = sorted(suspects, key=lambda suspect: -suspect.p_yes)
    compared = by_p_yes[: max(1, _ENCODED_FOR_EACH * count // len(REASONS))]
    names = sorted(set().union(*(suspect.images for suspect in compared)))
    features = encoder.unit_features([load_image(folder / name) for name in names], batch_size=16)
    by_name = dict(zip(names, features, strict=True))
    for suspect in suspects:
        del suspect.worth[HIGHEST]
    for suspect in compared:
        first, second = suspect.images
        cosine = float(by_name[first] @ by_name[second])
        suspect.worth[FAR_APART] = suspect.p_yes * (1 - cosine)


def choose(suspects: Sequence[Suspect], count: int) -> list[tuple[Suspect, str]]:
    """Up to ``count`` pairs, each with its reason: as many of each reason as possible.

    A reason takes those of most worth, of each prompt one before it takes a second.
    """
    count = min(count, len(suspects))
    left = list(suspects)
    chosen: list[tuple[Suspect, str]] = []
    known = set().union(*(suspect.worth for suspect in suspects))
    reasons = [reason for reason in (*REASONS, FAR_APART) if reason in known]
    for number, reason in enumerate(reasons):
        # What other reasons could not fill goes to those after them.
        wanted = math.ceil((count - len(chosen)) / (len(reasons) - number))
        ordered = [suspect for suspect in left if reason in suspect.worth]
        ordered.sort(key=lambda suspect: (-suspect.worth[reason], -suspect.p_yes))
        numbers: Counter[tuple] = Counter()  # of pairs of a prompt
        turns = []
        for place, suspect in enumerate(ordered):
            turns.append((numbers[suspect.prompt], place))
            numbers[suspect.prompt] += 1
        for _, place in sorted(turns)[:wanted]:
            chosen.append((ordered[place], reason))
            left.remove(ordered[place])
    return chosen


def _row(
    suspect: Suspect, reason: str, folder: Path, is_editor: bool, is_themed: bool
) -> dict[str, Any]:
    """A line of FILE. Without a theme, build-dataset asks what needs none."""
    first = f"{folder.name}/{suspect.images[0]}"
    second = f"{folder.name}/{suspect.images[1]}"
    if is_editor:
        row = {"source": first, "edited": second, "instruction": suspect.about}
    else:
        row = {"image1": first, "image2": second}
        if is_themed:
            row["theme"] = suspect.about
    return row | {"chosen_by": reason, "p_yes": suspect.p_yes}
