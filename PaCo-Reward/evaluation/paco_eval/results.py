"""Tables made from results files (JSON lines, one item each)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from paco_judge.errors import UserError
from paco_judge.files import read_json_lines

Row = dict[str, Any]


def read_results(results_dir: Path, columns: Callable[[Row], Row]) -> pd.DataFrame:
    """The rows of a folder's results files.

    Args:
        results_dir: With ``*.jsonl``.
        columns: The columns of the table, from a row. ``model``, the file's name, is added.
    """
    rows = []
    for file in sorted(results_dir.glob("*.jsonl")):
        for row in read_json_lines(file):
            rows.append({"model": file.stem} | columns(row))
    if not rows:
        raise UserError(
            f"no results (*.jsonl) in {results_dir}: run the benchmark, which says why items have none"
        )
    return pd.DataFrame(rows)


def as_text(table: pd.DataFrame) -> str:
    """Aligned columns; numbers with four digits, ``-`` for none."""
    return table.to_string(index=False, na_rep="-", float_format="{:.4f}".format) + "\n"


def as_latex(table: pd.DataFrame) -> str:
    """A booktabs tabular."""
    text = table.to_latex(index=False, na_rep="-", float_format="%.4f", escape=True)
    return text.replace("±", r"$\pm$")


def write_tables(output: str, *tables: pd.DataFrame) -> None:
    """Print the tables, and write them to ``<output>.txt`` and ``<output>.tex``."""
    text = "\n".join(as_text(table) for table in tables)
    latex = "\n".join(as_latex(table) for table in tables)
    # Not by with_suffix: a name may be v1.5.
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text(latex, encoding="utf-8")
    print(text, end="")
