"""Tables of text, headings in the first row."""


def as_text(table: list[list[str]]) -> str:
    """Columns aligned by spaces."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"[": "{[}", "*": "{*}"}  # at the beginning of a row they would be read as an option of the row before
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
)


def as_latex(table: list[list[str]], names: int = 1) -> str:
    """A booktabs tabular of any text; the first `names` columns are set on the left, the others on the right."""
    rows = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in table]
    columns = "l" * names + "r" * (len(table[0]) - names)
    head = [r"\begin{tabular}{" + columns + "}", r"\toprule", rows[0], r"\midrule"]
    return "\n".join([*head, *rows[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"
