"""A report of scores as HTML."""

from pathlib import Path

import jinja2
from PIL import Image

from paco_judge.images import data_url
from paco_reward.asking import ScoreReport

_SIDE = 192  # pixels of a picture
_NO = (240, 178, 122)  # orange to blue, both light enough for dark text
_YES = (133, 193, 233)


def sheet(report: ScoreReport, whole_page: bool = False) -> str:
    """HTML with the pictures inside, to put into a page or as a ``whole_page``.

    Every text in it is escaped.
    """
    html = Path(__file__).with_name("sheet.html").read_text(encoding="utf-8")
    template = jinja2.Template(html, autoescape=True, undefined=jinja2.StrictUndefined)
    scores = {(row.first, row.second, row.dimension): row.verdict for row in report.rows}
    pictures = [_picture(image) for image in report.images]
    are_small = [max(image.size) < _SIDE for image in report.images]
    return template.render(
        report=report,
        rows=report.rows,
        scores=scores,
        whole_page=whole_page,
        pictures=pictures,
        small=are_small,
        color=_color,
    )


def _picture(image: Image.Image) -> str:
    thumbnail = image.copy()
    thumbnail.thumbnail((_SIDE, _SIDE))
    return data_url(thumbnail)


def _color(p_yes: float) -> str:
    channels = [no + (yes - no) * p_yes for no, yes in zip(_NO, _YES, strict=True)]
    return "rgb({:.0f} {:.0f} {:.0f})".format(*channels)
