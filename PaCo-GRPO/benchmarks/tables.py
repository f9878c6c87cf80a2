"""JSON reports become Markdown tables and plots.

    python benchmarks/tables.py benchmarks/results/MACHINE                        # tables.md and a PNG for each report
    python benchmarks/tables.py benchmarks/results/* --readme benchmarks/README.md

With --readme, what stands between the lines ``<!-- results -->`` and ``<!-- /results -->`` of that file is replaced by the
tables of all folders given.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring.machine import FORMAT
from measuring.markdown import KINDS, head
from measuring.plots import FIGURES, plot

BEGIN, END = "<!-- results -->", "<!-- /results -->"
ORDER = list(KINDS)


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 where nothing can be made."""
    arguments = parser().parse_args(given)
    texts = []
    try:
        for folder in dict.fromkeys(folder.resolve() for folder in arguments.folders):
            if not folder.is_dir():
                continue
            reports = read(folder)
            for path, report in reports:
                if report["benchmark"] in FIGURES:
                    plot(report, path.with_suffix(".png"))
            if reports:
                (folder / "tables.md").write_text(page(folder, reports, folder))
                texts.append(page(folder, reports, arguments.readme.resolve().parent if arguments.readme else folder))
        if not texts:
            raise ValueError(f"no report (*.json) in {', '.join(map(str, arguments.folders))}")
        if arguments.readme:
            replace_between(arguments.readme, "\n".join(texts))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(folder: Path) -> list[tuple[Path, dict]]:
    """The reports in ``folder`` that tables are known for, in the order of ``KINDS`` and then by name.

    Raises:
        ValueError: A file is no JSON, or its format is another one.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            report = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}): delete it and measure again") from error
        if not isinstance(report, dict) or report.get("benchmark") not in KINDS:
            continue
        if report["format"] != FORMAT:
            raise ValueError(f"{path} has format {report['format']}, this program reads {FORMAT}: measure again")
        found.append((path, report))
    return sorted(found, key=lambda each: (ORDER.index(each[1]["benchmark"]), each[0].name))


def page(folder: Path, reports: Sequence[tuple[Path, dict]], seen_from: Path) -> str:
    """Markdown of one machine, each report folded up; links are relative to ``seen_from``."""
    parts = [f"### {folder.name}\n"]
    for path, report in reports:
        link = os.path.relpath(path, seen_from)
        picture = os.path.relpath(path.with_suffix(".png"), seen_from)
        parts += [f"<details><summary>{path.stem}</summary>\n", f"[JSON]({link}). {head(report)}"]
        parts.append(KINDS[report["benchmark"]](report))
        if report["benchmark"] in FIGURES:
            parts.append(f"![{path.stem}]({picture})\n")
        parts.append("</details>\n")
    return "\n".join(parts)


def replace_between(path: Path, text: str) -> None:
    """Replace what stands between the markers of ``path``.

    Raises:
        ValueError: It has no such markers.
    """
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folders", type=Path, nargs="+", help="of JSON reports, one for each machine")
    made.add_argument("--readme", type=Path, help="file whose marked part is replaced")
    return made


if __name__ == "__main__":
    sys.exit(main())
