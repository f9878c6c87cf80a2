"""The wording of every question to the judge.

Source of the pairwise question: arXiv 2512.04784 (PaCo-RL). The wording of the editing questions is ours.
"""

from collections.abc import Mapping

_ANSWER = 'Answer "Yes" and "No" first, and then provide detailed reasons.'
_ANSWER_EDIT = "Answer Yes or No first, then reasons."

EDIT_DIMENSIONS = ("prompt_following", "consistency", "overall")  # as EditReward-Bench names them


def theme_question(theme: str) -> str:
    """The default question on two sub-figures of one grid with this theme sentence (text-to-image-set)."""
    return f"{_theme_part(theme)} {_ANSWER}"


def theme_no_duplicates_question(theme: str) -> str:
    """The theme question, with near-duplicates counting as No, so that copying one sub-figure does not pay."""
    return f"{_theme_part(theme)} If the two images are near-duplicates of each other, the answer is No. {_ANSWER}"


def criterion_question(criterion: str) -> str:
    """One criterion of an item's ``criteria``, without the theme."""
    return f"Do images meet the following criteria? {_sentence(criterion)} {_ANSWER}"


def pair_question(reasons: bool = True) -> str:
    """The question without a theme (ConsistencyRank's templates 3 and, without reasons, 2)."""
    asked = "Do the two images maintain consistency in terms of style, logic and identity?"
    return f"{asked} {_ANSWER}" if reasons else f'{asked} Answer only "Yes" or "No".'


def criteria_questions(criteria: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """One question for each non-empty criterion of ``{dimension: {name: text}}``, by dimension.

    Dimensions without a non-empty criterion are left out. ``verdict.mean_over_dimensions`` averages the scores.

    Raises:
        ValueError: No criterion has text.
    """
    questions = {
        dimension: tuple(criterion_question(text) for text in named.values() if text and text.strip())
        for dimension, named in criteria.items()
        if named
    }
    questions = {dimension: asked for dimension, asked in questions.items() if asked}
    if not questions:
        raise ValueError("the item has no criteria to ask about; use the theme question instead")
    return questions


def editing_consistency_question(instruction: str) -> str:
    """On (reference, edited): does everything that the instruction does not mention stay consistent?"""
    return (
        f"{_edited_part(instruction)} Does everything that the instruction does not mention (identity, style, layout "
        f"and background) stay consistent between the two images? {_ANSWER_EDIT}"
    )


def editing_instruction_question(instruction: str) -> str:
    """On (reference, edited): does the edit follow the instruction?"""
    return f"{_edited_part(instruction)} Does the second image follow the instruction? {_ANSWER_EDIT}"


def editing_questions(instruction: str) -> tuple[str, str]:
    """The two editing questions (consistency, instruction); the editing score is sqrt(q1 · q2)."""
    return editing_consistency_question(instruction), editing_instruction_question(instruction)


def editing_dimension_questions(dimension: str, instruction: str) -> dict[str, str]:
    """The questions on (reference, edited) that decide one of ``EDIT_DIMENSIONS``, by the dimension each asks about.

    ``overall`` asks both; its score is ``verdict.editing_score`` of the two.

    Raises:
        ValueError: Unknown dimension, or an empty instruction.
    """
    if dimension not in EDIT_DIMENSIONS:
        raise ValueError(f"there is no editing dimension {dimension!r}; there are {', '.join(EDIT_DIMENSIONS)}")
    if not instruction.strip():
        raise ValueError("the editing instruction is empty")
    consistency, following = editing_questions(instruction)
    asked = {"prompt_following": following, "consistency": consistency}
    return asked if dimension == "overall" else {dimension: asked[dimension]}


def grid_layout_question(rows: int, cols: int) -> str:
    """On one image: is it a grid of this layout? The wording is ours."""
    return (
        f"Is this image a {rows}x{cols} grid, that is {rows} row{'s' * (rows > 1)} of {cols} separate "
        f"picture{'s' * (cols > 1)} of equal size, with nothing missing and nothing merged? {_ANSWER_EDIT}"
    )


def build_messages(image_a_url: str, image_b_url: str | None, question: str) -> list[dict]:
    """OpenAI chat messages of one pair: image 1, image 2 (None: one image alone), text. URLs may be data URLs."""
    urls = [image_a_url] if image_b_url is None else [image_a_url, image_b_url]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]


def _theme_part(theme: str) -> str:
    return (
        f'Given two subfigures generated based on the theme: "{theme}", do the two images maintain consistency '
        "in terms of style, logic and identity?"
    )


def _edited_part(instruction: str) -> str:
    return f'The second image was made by editing the first image with the instruction: "{instruction.strip()}".'


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", '"')) else text + "."
