"""What is asked about images (templates: ``questions.toml``, or text files) and in which form."""

import argparse
import hashlib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.verdict import ANSWER_TOKENS

# With thinking off, Qwen3.5's answers begin with Yes or No. Other chat templates ignore it.
CHAT_OPTIONS = {"enable_thinking": False}
EDITING = ("editing_consistency", "editing_instruction")
BETTER = ("better", "better_edit")
EDIT_DIMENSIONS = ("prompt_following", "consistency", "overall")  # as EditReward-Bench names them
IMAGE_FORMATS = ("png", "jpeg")
_FIELD = re.compile(r"\{([a-z_]+)\}")
_KNOWN = (
    "theme",
    "criterion",
    "criterion_sentence",
    "instruction",
    "prompt",
    "rows",
    "rows_s",
    "cols",
    "cols_s",
)


@cache
def shipped() -> dict[str, str]:
    """Our templates by name."""
    return tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Question:
    """A template. ``name``: its shipped name, or its file's name without suffix."""

    name: str
    template: str

    @property
    def fields(self) -> set[str]:
        """A subset of theme, criterion, instruction, prompt, rows, cols."""
        return {field.partition("_")[0] for field in _FIELD.findall(self.template)}

    def text(self, **values: str | int) -> str:
        """The template with ``values`` in place of its fields."""
        if "criterion" in values:
            sentence = values["criterion"] = str(values["criterion"]).strip()
            values["criterion_sentence"] = sentence + "." * (
                not sentence.endswith((".", "!", "?", '"'))
            )
        values |= {
            f"{name}_s": "s" * (values[name] > 1) for name in ("rows", "cols") if name in values
        }
        return _FIELD.sub(lambda field: str(values[field[1]]), self.template)

    def texts(
        self, criteria: Mapping[str, Mapping[str, str]], **values: str
    ) -> dict[str, tuple[str, ...]]:
        """The texts to ask, by dimension: one for each criterion if the template is about criteria, else one.

        ``criteria`` are ``{dimension: {name: text}}``. Raises ValueError if none has text.
        """
        if "criterion" not in self.fields:
            return {"": (self.text(**values),)}
        asked = {}
        for dimension, named in criteria.items():
            stated = [
                criterion for criterion in (named or {}).values() if criterion and criterion.strip()
            ]
            if stated:
                asked[dimension] = tuple(
                    self.text(criterion=criterion, **values) for criterion in stated
                )
        if not asked:
            raise ValueError(
                "the item has no criteria to ask about; use the theme question instead"
            )
        return asked


def load_question(question: str, about: Collection[str] = _KNOWN) -> Question:
    """A shipped template, or the one in a text file. ``about``: fields that the caller fills in. Raises ValueError."""
    try:
        file = Path(question).expanduser()
        name, template = question, shipped().get(question)
        if template is None:
            name, template = file.stem, file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(shipped())
        raise ValueError(
            f"question {question!r} is no shipped template ({names}) and no text file: {error}"
        ) from error
    if not template.strip():
        raise ValueError(f"question file {question} is empty")
    for field in _FIELD.findall(template):
        if field not in _KNOWN or field.partition("_")[0] not in about:
            possible = ", ".join(f"{{{known}}}" for known in about) or "none"
            raise ValueError(
                f"question {question!r} has the field {{{field}}}; possible fields here: {possible}"
            )
    return Question(name, template)


def load_editing_questions(question: str | Sequence[str] = EDITING) -> tuple[Question, ...]:
    """One question about an edit, or two: is the rest kept, is the instruction followed. Raises ValueError."""
    named = (question,) if isinstance(question, str) else tuple(question)
    if len(named) not in (1, 2):
        raise ValueError(
            f"an edit is asked about with one or two questions, not {len(named)}: {', '.join(named)}"
        )
    return tuple(load_question(name, ("instruction",)) for name in named)


def editing_texts(
    questions: Sequence[Question], instruction: str, dimension: str = "overall"
) -> dict[str, str]:
    """The texts on (reference, edited) that decide one of ``EDIT_DIMENSIONS``, by the dimension that each is about.

    ``overall`` needs both; a single question decides every dimension. Raises ValueError.
    """
    if dimension not in EDIT_DIMENSIONS:
        raise ValueError(
            f"there is no editing dimension {dimension!r}; there are {', '.join(EDIT_DIMENSIONS)}"
        )
    if not instruction.strip():
        raise ValueError("the editing instruction is empty")
    consistency, *following = (
        question.text(instruction=instruction.strip()) for question in questions
    )
    if not following:
        return {"consistency": consistency}
    asked = {"prompt_following": following[0], "consistency": consistency}
    return asked if dimension == "overall" else {dimension: asked[dimension]}


def theme_question(theme: str) -> str:
    """The published question on two sub-figures of one grid."""
    return load_question("theme").text(theme=theme)


@dataclass(frozen=True)
class RequestForm:
    """How images and answers travel. The fields are described at ``add_form_arguments``."""

    image_labels: str | None = None
    image_format: str = "png"
    answer_tokens: str = "exact"

    def __post_init__(self) -> None:
        for name, known in (
            ("image_format", IMAGE_FORMATS),
            ("answer_tokens", tuple(ANSWER_TOKENS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}"
                )
        if (
            self.image_labels
            and "{n}" not in self.image_labels
            and re.search(r"\d", self.image_labels)
        ):
            raise ValueError(
                f"image_labels={self.image_labels!r}: write {{n}} for the number, as in '<img{{n}}>: '"
            )

    def label(self, number: int) -> str:
        """The text before image ``number``, counted from 1."""
        return (self.image_labels or "").replace("{n}", str(number))


DEFAULT_FORM = RequestForm()


def add_form_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of ``form_of`` to a command."""
    text = 'text before each image, {n} = its number: "<img{n}>: "; default: none'
    parser.add_argument("--image_labels", metavar="TEXT", help=text)
    parser.add_argument(
        "--image_format", choices=IMAGE_FORMATS, help="how the judge gets images; default: png"
    )
    text = "exact: Yes and No; variants: also y and n, upper and lower case, after a space"
    parser.add_argument("--answer_tokens", choices=tuple(ANSWER_TOKENS), help=text)


def form_of(options: argparse.Namespace, **defaults: str) -> RequestForm:
    """The form that a command line states; ``defaults`` replace ours. Raises ValueError."""
    stated = {field.name: getattr(options, field.name) for field in fields(RequestForm)}
    return RequestForm(
        **defaults | {name: value for name, value in stated.items() if value is not None}
    )


def record(questions: Sequence[Question], form: RequestForm) -> dict[str, Any]:
    """What was asked, for the files of a run."""
    asked = [
        asdict(q) | {"sha256": hashlib.sha256(q.template.encode()).hexdigest()} for q in questions
    ]
    return {"questions": asked, **asdict(form)}


@dataclass(frozen=True)
class Pair:
    """Images and a question about them; ``image_b`` None: one image alone."""

    image_a: Image.Image
    image_b: Image.Image | None
    question: str
    more_images: tuple[Image.Image, ...] = ()

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(
            image for image in (self.image_a, self.image_b, *self.more_images) if image is not None
        )


def build_messages(
    image_urls: Sequence[str], question: str, form: RequestForm = DEFAULT_FORM
) -> list[dict]:
    """OpenAI chat messages: the images in order, then the question."""
    content: list[dict[str, Any]] = []
    for number, url in enumerate(image_urls, start=1):
        if form.image_labels:
            content.append({"type": "text", "text": form.label(number)})
        content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
