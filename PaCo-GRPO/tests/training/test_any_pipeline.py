"""Runs of pipelines that have no policy of their own, or one of the user's."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from forked_runs import COMPARABLE, assert_same_training, run_to_end
from named import load as load_named
from PIL import Image
from tiny_run import rows_of, tiny_options, train

from paco_grpo.options import load_options
from paco_grpo.policies import PolicyLoadError
from paco_grpo.policies.loading import GENERIC
from paco_grpo.training import proof
from paco_grpo.training.build import build_run
from paco_grpo.training.resolve import resolve_defaults

FSDP2 = {"train__sharding": "fsdp2"}


def plan_of(options):
    return json.loads((Path(options.save_dir) / options.run_name / "plan.json").read_bytes())


def images_of(options):
    folder = Path(options.save_dir) / options.run_name / "eval" / "epoch_0001"
    return [np.asarray(Image.open(file), int) for file in sorted(folder.glob("[0-9]*.png"))]


@pytest.mark.parametrize(
    ("family", "policy", "expected"),
    [
        ("flux", None, (3.5, None, 28, 512)),
        ("flux", GENERIC, (3.5, None, 28, 512)),
        ("stable_diffusion_3", None, (7.0, "", 28, 256)),
        ("qwen_image", None, (4.0, None, 50, 512)),  # None of its call is no guidance
        ("qwen_image_21", None, (1.0, None, 40, 1024)),
        ("krea2", GENERIC, (4.5, "", 28, 512)),
    ],
)
def test_the_pipelines_own_defaults(tiny_folder, family, policy, expected):
    changes = {"pretrained.model": str(tiny_folder(family)), "pretrained.policy": str(policy)}
    options = resolve_defaults(load_named("any_t2is", *changes.items()))
    sample = options.sample
    numbers = (sample.guidance_scale, sample.negative_prompt, options.test.num_steps)
    assert (*numbers, options.max_sequence_length) == expected
    given = {"sample.negative_prompt": "dull", "test.num_steps": "7", "max_sequence_length": "33"}
    options = resolve_defaults(load_named("any_t2is", *changes.items(), *given.items()))
    assert options.sample.negative_prompt == "dull"
    assert (options.test.num_steps, options.max_sequence_length) == (7, 33)


def test_a_run_by_the_pipelines_call_is_the_run_of_its_policy(tiny_flux_dir, tmp_path):
    rows, images = [], []
    for policy in (None, GENERIC):
        options = tiny_options(
            tiny_flux_dir,
            tmp_path,
            train__loss_type="ppo",
            train__resolution=32,
            train__batch_size=4,  # as in sampling, so that the first ratio is exactly 1
            num_epochs=1,
            eval_freq=1,
            pretrained__policy=policy,
            run_name=f"by_{policy}",
        )
        train(options)
        rows.append(rows_of(options, "train")[0])
        images.append(images_of(options))
        assert ("proof" in plan_of(options)) == (policy == GENERIC)
        assert rows[-1]["train/ratio_deviation"] == 0
    # A pixel of an image may be rounded in another way, and with it an advantage changes.
    for key in ("reward/brightness_mean", "train/loss", "train/grad_norm"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=5e-3, abs=1e-7), key
    assert len(images[0]) > 1
    for ours, native in zip(*images, strict=True):
        assert np.abs(ours - native).max() <= 1


def test_a_resumed_run_does_not_prove_again(tiny_flux_dir, tmp_path, monkeypatch):
    options = tiny_options(tiny_flux_dir, tmp_path, pretrained__policy=GENERIC, num_epochs=1)
    train(options)
    before = plan_of(options)["proof"]
    sizes = [(part["height"], part["width"]) for part in before["differences"]]
    assert sizes[0] == (64, 128) and len(sizes) == 3
    saved = str(Path(options.save_dir) / options.run_name / "config.yaml")
    again = {"resume_from": "latest"}
    with mock.patch.object(proof, "prove", wraps=proof.prove) as prove:
        for changes, calls in (({}, 0), ({"sample.guidance_scale": "2.5"}, 1)):
            build_run(load_options(saved, (again | changes).items())).close()
            assert prove.call_count == calls
        monkeypatch.setattr(proof, "_CODE", (__file__,))
        build_run(load_options(saved, again.items())).close()
        assert prove.call_count == 2
    assert options.pretrained.policy == load_options(saved).pretrained.policy


def test_a_policy_that_samples_something_else_is_refused(tiny_flux_dir, tmp_path, monkeypatch):
    code = "from paco_grpo.policies.flux import FluxPolicy\n\n\nclass Strong(FluxPolicy):\n"
    code += (
        "    def velocity(self, *arguments):\n        return 1.2 * super().velocity(*arguments)\n"
    )
    (tmp_path / "my_strong.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = tiny_options(tiny_flux_dir, tmp_path, pretrained__policy="my_strong:Strong")
    with pytest.raises(PolicyLoadError, match=r"at 64x128.* by up to \d+ of 255 levels"):
        build_run(options)


def test_texts_of_unknown_templates_keep_the_pipelines_length(tiny_flux_dir, tmp_path):
    changes = {"pretrained__policy": GENERIC, "max_sequence_length": 0}
    with mock.patch("paco_grpo.policies.loading.needed_length", side_effect=AssertionError):
        run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    assert run.options.max_sequence_length == 512
    run.close()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_processes_prove_and_train_together(tiny_flux_dir, tmp_path, strategy):
    folders = [tmp_path / "one", tmp_path / "two"]
    options = COMPARABLE | {"pretrained__policy": GENERIC, "train__learning_rate": 5e-3}
    for processes, folder in enumerate(folders, start=1):
        folder.mkdir()
        run_to_end(
            tiny_flux_dir, folder, processes, **options, **(strategy if processes > 1 else {})
        )
        plan = json.loads((folder / "runs" / "run" / "plan.json").read_bytes())
        assert plan["proof"]["differences"][0]["largest"] <= 1
    assert_same_training(*folders)
