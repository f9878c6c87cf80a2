"""What the judge is asked: every wording, in one place.

Source of the pairwise question: arXiv 2512.04784 (PaCo-RL). The wording of the editing questions is ours.
"""

from collections.abc import Mapping

_ANSWER = 'Answer "Yes" and "No" first, and then provide detailed reasons.'
_ANSWER_EDIT = "Answer Yes or No first, then reasons."

QUESTION_VARIANTS = ("theme", "theme_no_duplicates", "criteria")
EDIT_DIMENSIONS = ("prompt_following", "consistency", "overall")  # as EditReward-Bench names them


def theme_question(theme: str) -> str:
    """The default question on two sub-figures of one grid with this theme sentence (text-to-image-set)."""
    return f"{_theme_part(theme)} {_ANSWER}"


def theme_no_duplicates_question(theme: str) -> str:
    """The theme question, with a pair of near-duplicates counting as No (against copies of one sub-figure)."""
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

    Dimensions without a non-empty criterion are left out. Scores are averaged within a dimension, then over
    dimensions (``paco_judge.verdict.mean_over_dimensions``). Raises ValueError if nothing is left to ask.
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
    """On (reference, edited): does everything that the instruction does not mention stay as it was?"""
    return (
        "The second image was made by editing the first image with the instruction: "
        f'"{instruction.strip()}". Does everything that the instruction does not mention (identity, style, layout and '
        f"background) stay consistent between the two images? {_ANSWER_EDIT}"
    )


def editing_instruction_question(instruction: str) -> str:
    """On (reference, edited): does the edit follow the instruction?"""
    return (
        "The second image was made by editing the first image with the instruction: "
        f'"{instruction.strip()}". Does the second image follow the instruction? {_ANSWER_EDIT}'
    )


def editing_questions(instruction: str) -> tuple[str, str]:
    """The two editing questions (consistency, instruction); the editing score is sqrt(q1 · q2)."""
    return editing_consistency_question(instruction), editing_instruction_question(instruction)


def editing_dimension_questions(dimension: str, instruction: str) -> dict[str, str]:
    """The questions that decide one of ``EDIT_DIMENSIONS`` on (reference, edited), by the dimension each asks about.

    ``overall`` asks both; its score is ``paco_judge.verdict.editing_score`` of the two. Raises ValueError for another
    dimension or an instruction without text.
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
    """OpenAI chat messages of one pair: image 1, image 2 (None: there is only one), text, in this order.

    The urls are what the server accepts: for ours, data URLs such as those of ``paco_judge.client.png_data_url``.
    """
    urls = [image_a_url] if image_b_url is None else [image_a_url, image_b_url]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]


def _theme_part(theme: str) -> str:
    return (
        f'Given two subfigures generated based on the theme: "{theme}", do the two images maintain consistency '
        "in terms of style, logic and identity?"
    )


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", '"')) else text + "."
