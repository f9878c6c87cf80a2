"""The model card of an adapter: its code runs, and gives the trainer's image."""

import functools
import re
import shutil

import diffusers
import numpy as np
import pytest
from diffusers import FluxPipeline
from diffusers.pipelines.kandinsky5.pipeline_output import KandinskyImagePipelineOutput
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from tiny_policies import FAMILIES, draw, picture, trained
from tiny_run import family_options

from paco_grpo.options import RunOptions
from paco_grpo.options.schema import PretrainedOptions, TestOptions, TrainOptions
from paco_grpo.policies import adapters
from paco_grpo.policies.diffusers_policy import on_white
from paco_grpo.training.build import build_run
from paco_grpo.training.model_card import add_check, add_evaluation, write_model_card
from paco_grpo.types import Item

SIDE = 64  # FLUX.2's pipelines take no smaller reference


def options_for(name, folder):
    return RunOptions(
        pretrained=PretrainedOptions(model=str(folder)),
        train=TrainOptions(max_sequence_length=20, resolution=48),
        test=TestOptions(resolution=SIDE, num_steps=3),
        prompt_fn="geneval_image" if FAMILIES[name].references else "geneval",
        run_name="fox",
    )


def code_of(folder):
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


# Of the editors, those whose card has lines of its own.
EDITORS = ("qwen_image_edit_plus", "longcat_image_edit", "flux2_klein")
GENERATORS = [name for name in FAMILIES if name in EDITORS or not FAMILIES[name].references]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "diffusers") for name in GENERATORS), ("flux", "adapter")]
)
def test_the_code_of_a_card_gives_the_trainers_image(
    tiny_folder, tmp_path, monkeypatch, name, kind
):
    """In float32 on the CPU, where the noise is the same; editors' pipelines resize the photo."""
    monkeypatch.chdir(tmp_path)
    edits = FAMILIES[name].references > 0
    is_unknown = name.startswith("longcat")
    policy = trained(name, tiny_folder(name), max_sequence_length=40)
    folder = tmp_path / kind
    save = adapters.save_peft if kind == "adapter" else adapters.save_diffusers
    save(policy, folder)
    write_model_card(folder, options_for(name, tiny_folder(name)), policy, epochs=2)
    for module in (pipeline_longcat_image_edit, pipeline_qwenimage_edit_plus):
        # Not a megapixel, which takes half a minute.
        monkeypatch.setattr(module, "calculate_dimensions", lambda *_: (SIDE, SIDE))
    photo = picture(5, 2 * SIDE, 2 * SIDE)
    photo.save("photo.png")

    card = (folder / "README.md").read_text()
    assert "for 2 epochs at 48 px and 20 text tokens" in card
    assert ("load_image" in card) == ("size for the reference" in card) == edits
    assert ("load it with strength 1. Tried" in card) == (kind != "adapter" and not is_unknown)
    assert ("not known whether ComfyUI" in card) == is_unknown
    code = code_of(folder).replace("bfloat16", "float32").replace("'cuda'", "'cpu'")
    exec(code.replace("FOLDER OF THIS FILE", str(folder)), {})  # noqa: S102 - as a reader runs it

    if edits:
        return
    item = Item(0, "a red fox")
    (ours,) = draw(policy, [item], [0], SIDE, SIDE, num_steps=3)
    with Image.open("image.png") as image:
        difference = np.asarray(on_white(image), np.int16) - np.asarray(ours, np.int16)
    assert np.abs(difference).max() <= 1


def test_a_run_and_its_card_name_layers_that_comfyui_skips(tiny_folder, tmp_path, caplog):
    targets = {"train__lora_targets": r".*(to_q|stream_modulation.*linear)", "num_epochs": 0}
    run = build_run(family_options("flux2_klein", tiny_folder("flux2_klein"), tmp_path, **targets))
    assert "skips 3 of this LoRA's 5 layers" in caplog.text
    folder = run.checkpoints.save() / "diffusers"
    card = (folder / "README.md").read_text()
    assert "skips 3 of this LoRA's 5 layers" in card and "strength 1" in card
    for sheet in ("first", "second"):
        (tmp_path / "made.png").write_text(sheet)
        add_check(folder, f"The {sheet} check.")
        add_evaluation(folder, f"The {sheet} evaluation.", tmp_path / "made.png")
    head, marker, options = card.partition("## Configuration\n")
    check = "## Check\n\nThe second check.\n\n"
    evaluation = (
        "## Evaluation\n\nThe second evaluation.\n\n![Images of the evaluation](sheet.png)\n\n"
    )
    assert (folder / "README.md").read_text() == head + check + evaluation + marker + options
    assert (folder / "sheet.png").read_text() == "second"
    run.close()


def test_the_code_fits_an_output_of_another_class(tiny_flux_dir, tmp_path, monkeypatch):
    """Kandinsky 5 returns ``image``, where other pipelines return ``images``."""
    monkeypatch.chdir(tmp_path)

    class OtherFlux(FluxPipeline):
        @functools.wraps(FluxPipeline.__call__)
        def __call__(self, *arguments, **named):
            return KandinskyImagePipelineOutput(super().__call__(*arguments, **named).images)

    monkeypatch.setattr(diffusers, "OtherFlux", OtherFlux, raising=False)
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "OtherFlux"))
    policy = trained("flux", tmp_path / "model", policy_name="generic")
    folder = tmp_path / "diffusers"
    adapters.save_diffusers(policy, folder)
    write_model_card(folder, options_for("flux", tmp_path / "model"), policy, epochs=3)
    code = code_of(folder).replace("bfloat16", "float32").replace("'cuda'", "'cpu'")
    exec(code.replace("FOLDER OF THIS FILE", str(folder)), {})  # noqa: S102 - as a reader runs it
    assert Image.open("image.png").size == (SIDE, SIDE)
