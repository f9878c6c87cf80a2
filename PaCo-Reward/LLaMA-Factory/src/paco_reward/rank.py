"""`paco-reward rank`: a page on this machine, on which people rank and label pictures."""

import argparse
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import locked

HELP = """A page on this machine, on which people rank sets of pictures and label pairs and edits.
Each answer is on the disk before the next picture; the same command goes on where each person
stopped. Ctrl-C ends it, and prints the commands that build training data from the answers."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `rank` to the command line."""
    text = "a page on which people rank sets of pictures, and label pairs and edits"
    parser = commands.add_parser("rank", help=text, description=HELP)
    add = parser.add_argument
    add("--sets", type=Path, metavar="FOLDER", help="OUTPUT of build-dataset --sets_only")
    text = ".csv, .jsonl or .json with image1, image2 and optional theme; other columns are kept"
    add("--pairs", type=Path, metavar="FILE", help=text)
    text = "jsonl with source, edited, instruction; other keys are kept"
    add("--editing", type=Path, metavar="FILE", help=text)
    text = "folder for answers/NAME.jsonl and the results"
    add("--output", type=Path, metavar="FOLDER", required=True, help=text)
    text = "default: %(default)s; from elsewhere: ssh -L PORT:127.0.0.1:PORT"
    add("--port", type=int, default=7861, help=text)
    text = "decides the order of the questions (default %(default)s)"
    add("--seed", type=int, default=42, help=text)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; then write the results and print what comes next."""
    from paco_judge.pages import PageServer, page_app
    from paco_reward.ranking import results, tasks
    from paco_reward.ranking.page import RankPage

    asked = []
    if args.sets:
        asked += tasks.read_sets(args.sets)
    if args.pairs:
        asked += tasks.read_pairs(args.pairs, args.output)
    if args.editing:
        asked += tasks.read_edits_of(args.editing, args.output)
    if not asked:
        raise UserError("nothing to ask: give --sets, --pairs or --editing")
    args.output.mkdir(parents=True, exist_ok=True)
    agreement: dict[str, Any] = {}

    def finish() -> list[str]:
        agreement.update(results.write_results(args.output, asked, args.sets))
        return results.commands(args.output, args.sets)

    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    with locked(args.output):
        with ExitStack() as stack:
            page = RankPage(tasks.in_order(asked, args.seed), args.output, finish, stack)
            with PageServer(lambda key: page_app(page, key), args.port) as server:
                print(f"{len(asked)} questions. Ctrl-C ends the page.")
                print(server.announcement(), flush=True)
                server.wait()
        commands = finish()
    for line in summary(agreement):
        print(line)
    for line in commands:
        print(line)
    return 0


def summary(agreement: Mapping[str, Any]) -> list[str]:
    """What agreement.json says, in sentences."""
    lines = []
    for name, person in agreement["people"].items():
        line = f"{name}: {person['answers']} answered, {person['skipped']} of them skipped"
        repeats = person["with_themselves"]
        if repeats["n"]:
            line += (
                f"; the same answer when asked again: {repeats['share']:.2f} of "
                f"{repeats['n']} comparisons"
            )
        lines.append(line)
    for kind, numbers in agreement["between_people"].items():
        pairwise = numbers["pairwise"]
        if pairwise["n"]:
            line = (
                f"{kind}s: people agree on {pairwise['share']:.2f} of {pairwise['n']} comparisons"
            )
            concordance = numbers.get("kendalls_w")
            if concordance and concordance["n"]:
                line += f", Kendall's W {concordance['mean']:.2f} over {concordance['n']} sets"
            lines.append(line)
    return lines
