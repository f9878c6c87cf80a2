import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_judge.grid import PromptLayoutError, parse_layout, split_image, split_prompt

LABELS = {
    (1, 3): ["[LEFT]", "[MIDDLE]", "[RIGHT]"],
    (1, 4): ["[LEFT]", "[MIDDLE-LEFT]", "[MIDDLE-RIGHT]", "[RIGHT]"],
    (2, 1): ["[TOP]", "[BOTTOM]"],
    (3, 1): ["[TOP]", "[CENTER]", "[BOTTOM]"],
    (4, 1): ["[TOP]", "[MIDDLE-TOP]", "[MIDDLE-BOTTOM]", "[BOTTOM]"],
    (2, 3): [f"[{row}-{col}]" for row in ("TOP", "BOTTOM") for col in ("LEFT", "MIDDLE", "RIGHT")],
    (3, 2): [
        f"[{col}]-[{row}]" for row in ("TOP", "CENTER", "BOTTOM") for col in ("LEFT", "RIGHT")
    ],
    (3, 3): [
        f"[{row}]-[{col}]"
        for row in ("TOP", "MIDDLE", "BOTTOM")
        for col in ("LEFT", "MIDDLE", "RIGHT")
    ],
    (3, 4): [f"PANEL-{n}" for n in range(1, 13)],
}
# Texts may hold colons, brackets, quotes and label-like words that do not follow the end of a sentence.
words = st.text(alphabet="abc dé,:-[]LEFT'’", min_size=1, max_size=30).map(str.strip).filter(bool)
ends = st.sampled_from([".", '."', '"', "!", "?", "…", ".'"])


def test_layout_is_the_first_one_stated_rows_first():
    prompts = ("a 2x3 grid layout of cats", "a 1 x 7 grid", "a 2⨉4 grid then 3x3", "a cat")
    assert [parse_layout(prompt) for prompt in prompts] == [(2, 3), (1, 7), (2, 4), (1, 1)]


@pytest.mark.parametrize(
    ("prompt", "layout"),
    [
        ("a 2×2 grid", (2, 2)),  # the multiplication sign
        ("a 2X3 grid layout", (2, 3)),
        ("A 1024x1024 image with a 2x2 grid layout", (2, 2)),
        ("768 × 512, a 1×3 grid", (1, 3)),
        ("a 64x64 px icon, a 2x1-grid", (2, 1)),
        ("a 4x4 truck in a 2x3 grid layout", (2, 3)),
        ("a 2*3 grid, a 2 by 2 grid", (2, 3)),
        ("a grid of 2 by 3 photos", (2, 3)),
        ("2x1 of a fox in a 4x4 truck. [TOP]: a. [BOTTOM]: b.", (2, 1)),
        ("a red 4x4 truck in mud", (1, 1)),
        ("a 3x3 cube", (1, 1)),
        ("a 2 by 4 plank", (1, 1)),
        ("a 1024x1024 photo", (1, 1)),
        ("a 64x64-pixel icon", (1, 1)),
        ("12.5x10.5 cm", (1, 1)),
        ("a 32 x 32 pixels icon", (1, 1)),
    ],
)
def test_sizes_and_other_products_are_no_layouts(prompt, layout):
    assert parse_layout(prompt) == layout


@given(layout=st.sampled_from(sorted(LABELS)), data=st.data())
def test_splitting_undoes_building(layout, data):
    rows, cols = layout
    theme = f"{rows}x{cols} grid layout depicting {data.draw(words)}. A{data.draw(words)}{data.draw(ends)}"
    texts = [data.draw(words) + data.draw(ends) for _ in range(rows * cols)]
    order = data.draw(st.permutations(range(rows * cols)))
    prompt = theme + "".join(f" {LABELS[layout][index]}:{texts[index]}" for index in order)
    split = split_prompt(prompt)
    assert (split.rows, split.cols, split.theme) == (rows, cols, theme)
    assert list(split.panels) == texts, "row-major, whatever the order in the prompt"


@pytest.mark.parametrize("order", itertools.permutations(("TOP", "MIDDLE", "BOTTOM")))
def test_the_middle_of_a_column_is_a_row(order):
    prompt = "A 3x1 grid layout of a fox! " + " ".join(f"[{name}]: {name}?" for name in order)
    assert split_prompt(prompt).panels == ("TOP?", "MIDDLE?", "BOTTOM?")


def test_a_cell_of_a_table_may_be_named_by_its_row_or_column_alone():
    cells = {"[BOTTOM]-[RIGHT]": 8, "[RIGHT]": 5, "[CENTER]": 4, "[TOP]": 1, "[TOP]-[LEFT]": 0}
    cells |= {"[LEFT]": 3, "[BOTTOM]": 7, "[RIGHT]-[TOP]": 2, "[BOTTOM-LEFT]": 6}
    prompt = "A 3x3 grid." + "".join(f" {label}:{number}." for label, number in cells.items())
    assert split_prompt(prompt).panels == tuple(f"{number}." for number in range(9))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("2x2 grid of x. [TOP]-[LEFT]:a. [TOP]-[RIGHT]:b. [BOTTOM]-[LEFT]:c.", "3 panel labels"),
        ("1x2 grid of x. [LEFT]:a. [LEFT]:b.", "more than once"),
        ("1x2 grid of x. [LEFT]:a. [RIGHT]: ", r"\[RIGHT\]"),
        ("a 0x3 grid", "0x3"),
    ],
)
def test_panels_that_do_not_match_are_an_error(prompt, named):
    with pytest.raises(PromptLayoutError, match=named):
        split_prompt(prompt)


@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 7),
    extra=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    cell=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_cells_are_equal_and_row_major(rows, cols, extra, cell):
    width, height = (
        cols * cell[0] + min(extra[0], cols - 1),
        rows * cell[1] + min(extra[1], rows - 1),
    )
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    cells = split_image(Image.fromarray(pixels), rows, cols)
    assert len(cells) == rows * cols
    for index, image in enumerate(cells):
        row, col = divmod(index, cols)
        top, left = row * cell[1], col * cell[0]
        np.testing.assert_array_equal(
            np.asarray(image), pixels[top : top + cell[1], left : left + cell[0]]
        )


def test_an_image_smaller_than_its_grid_is_an_error():
    with pytest.raises(ValueError, match="3x1 pixels cannot be cut into 2x2"):
        split_image(Image.new("RGB", (3, 1)), 2, 2)
