import pytest

from paco_judge.questions import (
    EDITING,
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
    assert load_question(template("\ufeffSame { theme }?")).text(theme="fox") == "Same fox?"
    wrong = {"{themes}?": "{themes}.*{theme}", "{Theme}?": "{Theme}.*{theme}", " \n": "mine.txt"}
    for text, named in wrong.items():
        with pytest.raises(ValueError, match=named):
            load_question(template(text))


def test_a_file_that_is_called_as_a_shipped_question_has_a_name_of_its_own(tmp_path):
    """The rewards and benchmarks know some of the shipped ones."""
    file = tmp_path / "editing_instruction.txt"
    file.write_text("{instruction}: is it done?")
    question = load_question(str(file))
    assert question.name not in shipped()
    assert list(editing_texts((question,), "dye it")) == [question.name]


def test_criteria_are_one_question_each_and_empty_ones_are_not_asked(template):
    criteria = {
        "Style": {"Palette": "Colours match", "Line": "  "},
        "Logic": {"": ""},
        "Identity": {"A": "a.", "B": "b."},
    }
    asked = load_question("criteria").texts(criteria | {"Empty": None})
    assert list(asked) == ["Style", "Identity"]
    assert "Do images meet the following criteria? Colours match. Answer" in asked["Style"][0]
    mine = load_question(template("{theme} {criterion}"))
    assert mine.texts(criteria, theme="T") == {
        "Style": ("T Colours match",),
        "Identity": ("T a.", "T b."),
    }
    with pytest.raises(ValueError, match="no criteria"):
        mine.texts({"Style": {"Palette": ""}}, theme="T")


@pytest.mark.parametrize("names", [EDITING[::-1], (*EDITING, "pair"), ()])
def test_editing_questions_that_have_no_place_are_refused(names):
    with pytest.raises(ValueError, match="about an edit"):
        load_editing_questions(names)


def test_messages_are_images_then_text_each_image_after_its_label():
    first, second = ({"type": "image_url", "image_url": {"url": f"data:{x}"}} for x in "ab")
    text = {"type": "text", "text": "same?"}
    urls = ["data:a", "data:b"]
    assert build_messages(urls, "same?") == [{"role": "user", "content": [first, second, text]}]
    (labeled,) = build_messages(urls, "same?", RequestForm("<img{n}>: "))
    labels = [{"type": "text", "text": f"<img{number}>: "} for number in (1, 2)]
    assert labeled["content"] == [labels[0], first, labels[1], second, text]
    with pytest.raises(ValueError, match="{n}"):
        RequestForm("<img1>: ")  # of every image
