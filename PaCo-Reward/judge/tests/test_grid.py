import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_judge.grid import PromptLayoutError, parse_layout, split_image, split_prompt

LABELS = {
    (1, 3): "[LEFT] [MIDDLE] [RIGHT]",
    (1, 4): "[LEFT] [MIDDLE-LEFT] [MIDDLE-RIGHT] [RIGHT]",
    (2, 1): "[TOP] [BOTTOM]",
    (3, 1): "[TOP] [CENTER] [BOTTOM]",
    (4, 1): "[TOP] [MIDDLE-TOP] [MIDDLE-BOTTOM] [BOTTOM]",
    (2, 3): "[TOP-LEFT] [TOP-MIDDLE] [TOP-RIGHT] [BOTTOM-LEFT] [BOTTOM-MIDDLE] [BOTTOM-RIGHT]",
    (3, 2): "[LEFT]-[TOP] [RIGHT]-[TOP] [LEFT]-[CENTER] [RIGHT]-[CENTER] [LEFT]-[BOTTOM] "
    "[RIGHT]-[BOTTOM]",
    # A cell of a table may be named by its row or its column alone.
    (3, 3): "[TOP]-[LEFT] [TOP] [RIGHT]-[TOP] [LEFT] [CENTER] [RIGHT] [BOTTOM-LEFT] [BOTTOM] "
    "[BOTTOM]-[RIGHT]",
    (3, 4): " ".join(f"PANEL-{number}" for number in range(1, 13)),
}
# Texts may hold colons, brackets, quotes and label-like words that do not follow the end of a sentence.
words = st.text(alphabet="abc dé,:-[]LEFT'’", min_size=1, max_size=30).map(str.strip).filter(bool)
ends = st.sampled_from([".", '."', '"', "!", "?", "…", ".'"])


@pytest.mark.parametrize(
    ("prompt", "layout"),
    [
        ("a cat", (1, 1)),
        ("a 1 x 7 grid", (1, 7)),
        ("a 2⨉4 grid then a 3x3 grid", (2, 4)),
        ("A 1024x1024 image with a 2X3 grid layout", (2, 3)),
        ("768 × 512, a 1×3 grid", (1, 3)),  # the multiplication sign
        ("a 4x4 truck in a 2x3 grid layout", (2, 3)),
        ("a 2*3 grid, a 2 by 2 grid", (2, 3)),
        ("a grid of 2 by 3 photos", (2, 3)),
        ("2x1 of a fox in a 4x4 truck. [TOP]: a. [BOTTOM]: b.", (2, 1)),
        ("a red 4x4 truck in mud", (1, 1)),
        ("a 2 by 4 plank", (1, 1)),
        ("12.5x10.5 cm", (1, 1)),
        ("a 32 x 32 pixels icon", (1, 1)),
    ],
)
def test_layout_is_the_first_grid_stated_and_not_a_size_or_another_product(prompt, layout):
    assert parse_layout(prompt) == layout


@given(layout=st.sampled_from(sorted(LABELS)), data=st.data())
def test_splitting_undoes_building(layout, data):
    rows, cols = layout
    theme = f"{rows}x{cols} grid layout depicting {data.draw(words)}. A{data.draw(words)}{data.draw(ends)}"
    texts = [data.draw(words) + data.draw(ends) for _ in range(rows * cols)]
    order = data.draw(st.permutations(range(rows * cols)))
    labels = LABELS[layout].split()
    prompt = theme + "".join(f" {labels[index]}:{texts[index]}" for index in order)
    split = split_prompt(prompt)
    assert (split.rows, split.cols, split.theme) == (rows, cols, theme)
    assert list(split.panels) == texts, "row-major, whatever the order in the prompt"


def test_the_middle_of_a_column_is_a_row():
    prompt = "A 3x1 grid layout of a fox! [MIDDLE]: 1? [BOTTOM]: 2? [TOP]: 0?"
    assert split_prompt(prompt).panels == ("0?", "1?", "2?")


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


@pytest.mark.parametrize("spare", [0, 1])
def test_cells_are_equal_and_row_major(spare):
    """3 rows of 4 pixels, 2 columns of 5; spare pixels are dropped."""
    pixels = np.random.default_rng(0).integers(0, 256, (12 + spare, 10 + spare, 3), dtype=np.uint8)
    cells = split_image(Image.fromarray(pixels), 3, 2)
    expected = [pixels[top : top + 4, left : left + 5] for top in (0, 4, 8) for left in (0, 5)]
    np.testing.assert_array_equal([np.asarray(cell) for cell in cells], expected)
