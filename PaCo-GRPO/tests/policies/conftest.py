"""The family tests on a policy of one's own: ``--policy my_policies:Mine --pipeline FOLDER``."""

from functools import partial

from diffusers import DiffusionPipeline
from tiny_policies import FAMILIES, VARIANTS, Family

from paco_grpo.options.schema import PretrainedOptions
from paco_grpo.policies.loading import pipeline_defaults, policy_class

YOURS = "yours"  # its name in FAMILIES


def pytest_addoption(parser):
    group = parser.getgroup("a policy of your own")
    group.addoption("--policy", help="as config.pretrained.policy")
    group.addoption("--pipeline", help="folder of a pipeline with tiny random weights")
    group.addoption(
        "--discarded", default="", help="regular expression for LoRA layers that nothing reads"
    )


def pytest_configure(config):
    folder = config.getoption("--pipeline", None)
    if folder is None:
        return
    name = config.getoption("--policy")
    policy = policy_class(PretrainedOptions(model=folder, policy=name))
    defaults = pipeline_defaults(policy)
    options = {"guidance_scale": defaults.guidance_scale}
    if policy.has_true_cfg:
        options["negative_prompt"] = defaults.negative_prompt or ""
    FAMILIES.clear()
    VARIANTS.clear()
    FAMILIES[YOURS] = Family(
        build=partial(DiffusionPipeline.from_pretrained, folder),
        options=options,
        references=policy.edits_images + policy.several_images,
        discarded=config.getoption("--discarded"),
        policy_name=name,
        rounding=0.5,  # weights of any scale
    )


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of other families."""
    if config.getoption("--pipeline", None) is not None:
        items[:] = [item for item in items if _family(item) == YOURS]


def _family(item):
    return item.callspec.params.get("name") if hasattr(item, "callspec") else None
