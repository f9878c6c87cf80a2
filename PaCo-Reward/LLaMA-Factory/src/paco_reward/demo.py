"""`paco-reward demo`: a page where a person shows images to a judge and sees its answers."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.errors import UserError
from paco_judge.grid import split_image
from paco_judge.images import load_image
from paco_judge.judge import Judge
from paco_reward.options import add_asking_options, judge_of
from paco_reward.score import ask, questions_about, sheet

MOST_IMAGES = 16  # 120 pairs
LARGEST_FILE = "32mb"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo` to the command line."""
    text = (
        "a page on this machine: drop images or a grid, and see the scores of all pairs and the "
        "judge's reasons"
    )
    parser = commands.add_parser("demo", help=text, description=text)
    text = "default: %(default)s; from elsewhere: ssh -L PORT:127.0.0.1:PORT"
    parser.add_argument("--port", type=int, default=7860, help=text)
    add_asking_options(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    page = build(judge_of(args), args.reason_tokens).queue(max_size=32)
    server = {"server_name": "127.0.0.1", "server_port": args.port, "max_file_size": LARGEST_FILE}
    page.launch(**server, quiet=True, prevent_thread_lock=True)
    print(f"The judge's page: http://127.0.0.1:{args.port}. Ctrl-C ends it.", flush=True)
    page.block_thread()
    return 0


def build(judge: Judge, reason_tokens: int) -> Any:
    """The page, a ``gradio.Blocks``. It asks ``judge`` one question set at a time."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing leaves this machine
    import gradio

    def answer(
        files: list | None, rows: float, columns: float, theme: str, edit: str, with_reasons: bool
    ) -> str:
        try:
            images, names = panels_of(files or [], int(rows or 1), int(columns or 1))
            if theme.strip() and edit.strip():
                raise UserError("give a theme or an editing instruction, not both")
            questions = questions_about(theme.strip() or None, edit.strip() or None)
            limit = reason_tokens if with_reasons else None
            return sheet(ask(judge, images, names, questions, limit))
        except ValueError as error:
            raise gradio.Error(str(error), duration=None) from error

    # A font's name in quotes would be fetched from the network.
    system = ["system-ui", "sans-serif"]
    theme = gradio.themes.Default(font=system, font_mono=["monospace"])
    with gradio.Blocks(title="PaCo-Reward", theme=theme, analytics_enabled=False) as page:
        gradio.Markdown(f"# Are these images consistent?\nJudge: `{judge.name}`")
        with gradio.Row():
            with gradio.Column(scale=2):
                images = gradio.Gallery(
                    label="Images (PNG, JPEG, WebP)", type="filepath", columns=4, height=320
                )
                with gradio.Row():
                    rows = gradio.Number(1, label="Grid rows", precision=0, minimum=1, maximum=8)
                    columns = gradio.Number(
                        1, label="Grid columns", precision=0, minimum=1, maximum=8
                    )
                theme_text = gradio.Textbox(
                    label="Theme", placeholder="optional: one red fox in four seasons"
                )
                hint = "if given, the other images are edits of the first"
                instruction = gradio.Textbox(label="Editing instruction", placeholder=hint)
                reasons = gradio.Checkbox(label="Reasons too (slower)")
                button = gradio.Button("Ask the judge", variant="primary")
            with gradio.Column(scale=3):
                result = gradio.HTML(
                    "<p>Drop two images or more, or one grid and its rows and columns.</p>"
                )
        inputs = [images, rows, columns, theme_text, instruction, reasons]
        button.click(answer, inputs, result, api_name="ask", concurrency_limit=1)
    return page


def panels_of(
    files: Sequence[tuple[str, str | None]], rows: int, columns: int
) -> tuple[list[Image.Image], list[str]]:
    """The images of ``files`` (path, caption) and their names, cut into panels of a grid."""
    images = []
    names = []
    for path, _ in files:
        panels = split_image(load_image(path), rows, columns)
        images += panels
        if len(panels) == 1:
            names.append(Path(path).name)
        else:
            names += [f"{Path(path).name} {number}" for number in range(1, len(panels) + 1)]
    if not 2 <= len(images) <= MOST_IMAGES:
        raise UserError(
            f"give 2 to {MOST_IMAGES} images, or one grid with its rows and columns, "
            f"not {len(images)}"
        )
    return images, names
