"""The parser of every command's arguments."""

import pytest

from paco_judge.arguments import Parser


def parser() -> Parser:
    parser = Parser(prog="command")
    parser.add_argument("--prompts_file")
    parser.add_argument("--seeds")
    parser.add_argument("--api-key")
    commands = parser.add_subparsers()
    inner = commands.add_parser("score")
    inner.add_argument("--image_size", type=int)
    return parser


def test_dashes_are_underscores_and_values_are_left_as_they_are():
    words = ["--prompts-file=a-b=", "--seeds", "x-y", "score", "--image-size", "3", "--other=x-y"]
    found, others = parser().parse_known_args(words)
    assert (found.prompts_file, found.seeds, found.image_size) == ("a-b=", "x-y", 3)
    assert others == ["--other=x-y"]
    assert parser().parse_args(["--api-key", "k"]).api_key == "k"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", "42"], "--seed"),
        (["--prompts_file", ""], "--prompts_file is empty"),
        (["--prompts-file="], "--prompts_file is empty"),
        (["score", "--image_size", ""], "--image_size is empty"),
        (["score", "--image", "3"], "--image"),
    ],
)
def test_abbreviations_and_empty_values_are_refused(capsys, words, named):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    assert named in capsys.readouterr().err
