"""Tables of text, headings in the first row."""


def as_text(table: list[list[str]]) -> str:
    """Columns aligned by spaces."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


def as_latex(table: list[list[str]], names: int = 1) -> str:
    """A booktabs tabular; the first `names` columns are set on the left, the others on the right."""

    def escape(text: str) -> str:
        for sign in "_%&#":
            text = text.replace(sign, f"\\{sign}")
        return text

    rows = [" & ".join(escape(cell) for cell in row) + r" \\" for row in table]
    columns = "l" * names + "r" * (len(table[0]) - names)
    head = [r"\begin{tabular}{" + columns + "}", r"\toprule", rows[0], r"\midrule"]
    return "\n".join([*head, *rows[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"
