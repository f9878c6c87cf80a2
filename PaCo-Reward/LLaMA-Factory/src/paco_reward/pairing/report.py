"""What was built: numbers as text, and a picture of some pairs."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from paco_reward.images import open_image
from paco_reward.pairing.journal import write_atomically
from paco_reward.pairing.records import LabelledPair

MEANINGS = {
    "prompts": "prompts",
    "sub_figures": "sub-figures",
    "sets": "sets of a reference and candidates",
    "prompts_without_sets": "prompts without sets (one panel, or one generation)",
    "rankings": "rankings read or made",
    "rankings_unreadable": "- answers that are no order",
    "rankings_without_answer": "- sets without an answer",
    "rankings_unclear": "- rankings left out by the rule (too short, or scores too near)",
    "rankings_used": "rankings used",
    "pairs_merged": "- the same two images in several rankings",
    "pairs_disputed": "- pairs that rankings disagree on",
    "edits": "editing rows",
    "editing_unclear": "- editing questions the judge is unsure of",
    "editing_without_answer": "- editing questions without an answer",
    "pairs_labelled": "labelled pairs",
    "near_duplicate": "- two images that are near-duplicates",
    "repeated": "- near-duplicates of another pair",
    "repeated_disputed": "- near-duplicates with different labels",
    "unbalanced": "- left out so that there are as many Yes as No",
    "reasons_contradicting": "- reasons that contradict their label",
    "reasons_unreadable": "- answers without verdict or reasons",
    "reasons_without_answer": "- reasons that the server refused",
    "reasons_missing": "- pairs without a written reason",
    "reasons_kept": "reasons written",
}
_SIDE, _TEXT, _GAP, _EACH = 144, 330, 10, 4


def dataset_numbers(pairs: Sequence[LabelledPair]) -> dict[str, int]:
    """Pairs, Yes, No, different images and groups (themes, or sources of edits) of one data set."""
    yes = sum(pair.label for pair in pairs)
    images = {name for pair in pairs for name in (pair.first, pair.second)}
    groups = len({pair.group for pair in pairs})
    return {"pairs": len(pairs), "yes": yes, "no": len(pairs) - yes, "images": len(images), "groups": groups}


def lines(stats: Mapping[str, Any]) -> list[str]:
    """The statistics as a table."""
    counts = stats["counts"]
    text = [f"{counts[name]:>9}  {meaning}" for name, meaning in MEANINGS.items() if counts.get(name)]
    for name, numbers in stats["datasets"].items():
        parts = "  ".join(f"{value} {key}" for key, value in numbers.items())
        text.append(f"{name}: {parts}")
    return text


def write_sheet(output: Path, datasets: Mapping[str, Sequence[LabelledPair]]) -> Path:
    """samples.png: the first pairs of either label of each data set, with answer and question."""
    samples = [
        (name, pair)
        for name, pairs in datasets.items()
        for label in (True, False)
        for pair in [pair for pair in pairs if pair.label == label][:_EACH]
    ]
    width, row = 2 * (2 * _SIDE + _TEXT + 2 * _GAP), _SIDE + _GAP
    sheet = Image.new("RGB", (width, _GAP + row * -(-len(samples) // 2)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for index, (name, pair) in enumerate(samples):
        left, top = index % 2 * (width // 2) + _GAP, index // 2 * row + _GAP
        for place, file in enumerate((pair.first, pair.second)):
            image = ImageOps.contain(open_image(output / file), (_SIDE, _SIDE))
            corner = (left + place * (_SIDE + 4), top)
            sheet.paste(image, corner)
            end = (corner[0] + image.width, corner[1] + image.height)
            draw.rectangle((corner[0] - 1, corner[1] - 1, *end), outline=(190, 190, 190))
        colour = (20, 120, 50) if pair.label else (170, 30, 30)
        text = left + 2 * _SIDE + _GAP
        draw.text((text, top), f"{pair.verdict}   {name}", fill=colour, font=font)
        body = [*textwrap.wrap(pair.question, 50)[:4], "", *textwrap.wrap(pair.answer, 50)[:4]]
        draw.multiline_text((text, top + 17), "\n".join(body), fill=(40, 40, 40), font=font, spacing=1)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    write_atomically(output / "samples.png", buffer.getvalue())
    return output / "samples.png"
