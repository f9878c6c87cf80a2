import pytest

from paco_judge import questions


def test_theme_question_is_the_published_wording():
    assert questions.theme_question("a red star.") == (
        'Given two subfigures generated based on the theme: "a red star.", do the two images maintain consistency in '
        'terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def test_near_duplicate_variant_says_no_to_copies():
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


def test_editing_questions_hold_the_instruction_and_ask_for_yes_or_no_first():
    consistency, instruction = questions.editing_questions("make it blue")
    assert consistency != instruction
    for question in (consistency, instruction):
        assert '"make it blue"' in question
        assert question.endswith("Answer Yes or No first, then reasons.")


def test_message_order_is_image_image_text():
    (message,) = questions.build_messages("data:a", "data:b", "same?")
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in message["content"][:2]] == ["data:a", "data:b"]
    assert message["content"][2]["text"] == "same?"
