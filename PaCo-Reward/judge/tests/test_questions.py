import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_judge.questions import (
    EDIT_DIMENSIONS,
    RequestForm,
    build_messages,
    editing_texts,
    load_editing_questions,
    load_question,
    shipped,
    theme_question,
)


@pytest.fixture
def template(tmp_path):
    """``template(text)``: the path of a text file with a user's question."""

    def write(text: str) -> str:
        file = tmp_path / "mine.txt"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def test_the_theme_question_is_the_published_wording():
    assert theme_question("a red star.") == (
        'Given two subfigures generated based on the theme: "a red star.", do the two images maintain consistency in '
        'terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def test_a_yes_to_the_question_of_the_win_rate_means_that_the_first_is_better():
    """The reward counts it so. A hash of the file would not say what a change of it does."""
    assert ". Is the first image better than the second, that is, does it" in shipped()["better"]
    better_edit = shipped()["better_edit"]
    assert ". Is the first of these two better than the second, that is, does it" in better_edit


def test_files_with_fields(template):
    question = load_question(
        template('{rows} x {cols}: {"a": {theme}}\n'), ("theme", "rows", "cols")
    )
    assert question.fields == {"theme", "rows", "cols"}
    assert question.text(theme="{rows}", rows=2, cols=3) == '2 x 3: {"a": {rows}}'
    for text, named in (("{themes}?", "{themes}.*{theme}"), (" \n", "mine.txt")):
        with pytest.raises(ValueError, match=named):
            load_question(template(text))


def test_criteria_are_one_question_each_and_empty_ones_are_not_asked(template):
    criteria = {
        "Style": {"Palette": "Colours match", "Line": "  "},
        "Logic": {"": ""},
        "Identity": {"A": "a.", "B": "b."},
    }
    asked = load_question("criteria").texts(criteria | {"Empty": None})
    assert {dimension: len(each) for dimension, each in asked.items()} == {
        "Style": 1,
        "Identity": 2,
    }
    assert asked["Style"][0].startswith(
        "Do images meet the following criteria? Colours match. Answer"
    )
    mine = load_question(template("{theme} {criterion}"))
    assert mine.texts(criteria, theme="T") == {
        "Style": ("T Colours match",),
        "Identity": ("T a.", "T b."),
    }
    assert load_question("pair").texts(criteria) == {None: (load_question("pair").text(),)}
    with pytest.raises(ValueError, match="no criteria"):
        mine.texts({"Style": {"Palette": ""}}, theme="T")


@given(st.text(min_size=1).filter(str.strip))
def test_editing_dimensions_ask_the_editing_questions(instruction):
    questions = load_editing_questions()
    asked = {name: editing_texts(questions, instruction, name) for name in EDIT_DIMENSIONS}
    assert asked["overall"] == asked["prompt_following"] | asked["consistency"]
    assert list(asked["overall"]) == ["prompt_following", "consistency"]
    assert asked["consistency"]["consistency"] == questions[0].text(instruction=instruction.strip())
    assert asked["prompt_following"]["prompt_following"] == questions[1].text(
        instruction=instruction.strip()
    )


@pytest.mark.parametrize(
    ("name", "about"),
    [("editing_instruction", "prompt_following"), ("editing_consistency", "consistency")],
)
def test_a_single_editing_question_has_its_own_name_and_decides_every_dimension(name, about):
    alone = load_editing_questions(name)
    expected = {about: alone[0].text(instruction="make it red")}
    for dimension in EDIT_DIMENSIONS:
        assert editing_texts(alone, "make it red", dimension) == expected


def test_a_users_single_question_is_named_as_its_file(template):
    alone = load_editing_questions(template("Is it {instruction}?"))
    assert editing_texts(alone, "red") == {"mine": "Is it red?"}


def test_editing_questions_in_each_others_place_are_refused():
    for names in (("editing_instruction", "editing_consistency"), ("editing_consistency",) * 2):
        with pytest.raises(ValueError, match="in the place of"):
            load_editing_questions(names)


def test_messages_are_images_then_text_each_image_after_its_label():
    (message,) = build_messages(["data:a", "data:b"], "same?")
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in message["content"][:2]] == ["data:a", "data:b"]
    assert message["content"][2]["text"] == "same?"
    (labeled,) = build_messages(["data:a", "data:b"], "same?", RequestForm("<img{n}>: "))
    label = [{"type": "text", "text": f"<img{number}>: "} for number in (1, 2)]
    assert labeled["content"] == [
        label[0],
        message["content"][0],
        label[1],
        *message["content"][1:],
    ]
    with pytest.raises(ValueError, match="{n}"):
        RequestForm("<img1>: ")  # of every image
