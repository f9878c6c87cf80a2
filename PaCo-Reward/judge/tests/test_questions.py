import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_judge import questions

instructions = st.text(min_size=1).filter(str.strip)


def test_theme_question_is_the_published_wording():
    assert questions.theme_question("a red star.") == (
        'Given two subfigures generated based on the theme: "a red star.", do the two images maintain consistency in '
        'terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def test_the_near_duplicate_variant_answers_no_to_copies():
    question = questions.theme_no_duplicates_question("a red star.")
    assert "near-duplicates" in question and '"a red star."' in question
    assert question.endswith(questions.theme_question("a red star.").split("identity? ")[1])


def test_criteria_are_one_question_each_and_empty_ones_are_not_asked():
    asked = questions.criteria_questions(
        {"Style": {"Palette": "Colours match", "Line": "  "}, "Logic": {"None": ""}, "Identity": {"A": "a.", "B": "b."}}
    )
    assert {dimension: len(each) for dimension, each in asked.items()} == {"Style": 1, "Identity": 2}
    assert asked["Style"][0].startswith("Do images meet the following criteria? Colours match. Answer")


def test_no_criteria_is_an_error():
    with pytest.raises(ValueError, match="no criteria"):
        questions.criteria_questions({"Style": {"Palette": ""}})


@given(instructions)
def test_editing_dimensions_ask_the_editing_questions(instruction):
    consistency, following = questions.editing_questions(instruction)
    asked = {name: questions.editing_dimension_questions(name, instruction) for name in questions.EDIT_DIMENSIONS}
    assert asked["prompt_following"] == {"prompt_following": following}
    assert asked["consistency"] == {"consistency": consistency}
    assert asked["overall"] == asked["prompt_following"] | asked["consistency"] and consistency != following
    for question in asked["overall"].values():
        before, text, after = question.partition(f'"{instruction.strip()}"')
        assert text and before.endswith("with the instruction: ")
        assert after.endswith("Answer Yes or No first, then reasons.")


@given(st.text(alphabet=" \t\n\u2003", max_size=5), st.sampled_from(questions.EDIT_DIMENSIONS))
def test_an_instruction_without_text_is_an_error(blank, dimension):
    with pytest.raises(ValueError, match="instruction is empty"):
        questions.editing_dimension_questions(dimension, blank)


def test_an_unknown_dimension_is_an_error():
    with pytest.raises(ValueError, match="no editing dimension 'quality'; there are prompt_following, consistency"):
        questions.editing_dimension_questions("quality", "make it blue")


def test_message_order_is_image_image_text():
    (message,) = questions.build_messages("data:a", "data:b", "same?")
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in message["content"][:2]] == ["data:a", "data:b"]
    assert message["content"][2]["text"] == "same?"


def test_the_grid_layout_question_is_about_one_image():
    (message,) = questions.build_messages("data:a", None, questions.grid_layout_question(1, 3))
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert "1x3 grid, that is 1 row of 3 separate pictures" in message["content"][1]["text"]
    assert "2x1 grid, that is 2 rows of 1 separate picture of" in questions.grid_layout_question(2, 1)
    assert message["content"][1]["text"].endswith("Answer Yes or No first, then reasons.")
