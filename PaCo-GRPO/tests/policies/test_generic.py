"""Pipelines that nobody wrote a policy for: native families, driven through their own calls."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_policies import FAMILIES, draw, items

from paco_grpo.policies import PolicySettings
from paco_grpo.policies.generic import GenericPolicy

SIZE = (64, 32)


def load_generic(name, folder, **options):
    family = FAMILIES[name]
    settings = {"max_sequence_length": 24} | family.options | options
    pipeline = DiffusionPipeline.from_pretrained(folder)
    return GenericPolicy(pipeline, PolicySettings(**settings))


@pytest.mark.parametrize("name", ["flux", "qwen_image", "stable_diffusion_3", "z_image"])
def test_images_are_those_of_the_pipeline(tiny_folder, name):
    policy = load_generic(name, tiny_folder(name))
    (item,) = items(name, "a blue star", size=SIZE)
    (ours,) = draw(policy, [item], [5], *SIZE, 3)
    plain = policy.pipeline_class.from_pretrained(tiny_folder(name))
    theirs = plain(
        **policy.pipeline_arguments(item),
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    difference = np.asarray(ours, int) - np.asarray(theirs, int)
    assert np.abs(difference).max() <= 1
