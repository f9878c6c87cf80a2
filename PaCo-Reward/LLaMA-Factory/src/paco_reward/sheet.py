"""Images and a judge's answers about them as HTML: a matrix of pair scores, or a row for each edit."""

from pathlib import Path

import jinja2
from PIL import Image

from paco_judge.images import data_url
from paco_reward.answers import Answers

_HTML = Path(__file__).with_name("sheet.html").read_text(encoding="utf-8")
_SIDE = 192  # pixels of a picture in the page
_NO, _YES = (240, 178, 122), (133, 193, 233)  # orange to blue, both light enough for dark text


def fragment(answers: Answers) -> str:
    """HTML to put into a page; every text in it is escaped."""
    return jinja2.Template(_HTML, autoescape=True, undefined=jinja2.StrictUndefined).render(
        answers=answers,
        pictures=[_picture(image) for image in answers.images],
        small=[max(image.size) < _SIDE for image in answers.images],
        scores=answers.scores,
        reasons=list(zip(answers.cells, answers.reasons)),
        color=_color,
    )


def page(answers: Answers) -> str:
    """A whole page, with the pictures inside."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        "<title>PaCo-Reward scores</title></head>\n"
        f'<body style="margin: 32px auto; max-width: 1100px; padding: 0 20px">\n{fragment(answers)}\n</body>\n</html>\n'
    )


def _picture(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((_SIDE, _SIDE))
    return data_url(small)


def _color(p_yes: float) -> str:
    return "rgb({:.0f} {:.0f} {:.0f})".format(*(no + (yes - no) * p_yes for no, yes in zip(_NO, _YES, strict=True)))
