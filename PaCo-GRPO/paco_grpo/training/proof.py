"""When a policy must prove that it gives its pipeline's images, and how a run remembers it.

Classes of our own are tested; all others prove themselves at the start (``policies/proof.py``).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import diffusers
import torch
import transformers

from paco_grpo.options import RunOptions
from paco_grpo.policies import diffusers_policy, generic
from paco_grpo.policies import proof as comparison
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.loading import GENERIC, POLICIES, policy_name
from paco_grpo.policies.proof import prove
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Item
from paco_judge.identity import Match, fingerprint, identity, match

logger = logging.getLogger(__name__)

_SMALL = 64  # px; some pipelines take no smaller images, or no other multiples
_CODE = (generic.__file__, diffusers_policy.__file__, comparison.__file__)
# Options on which images depend.
_OF_IMAGES = (
    "allow_tf32",
    "item_size",
    "max_sequence_length",
    "mixed_precision",
    "pretrained.policy",
    "pretrained.quantize",
    "sample.guidance_scale",
    "sample.negative_prompt",
    "test.resolution",
    "train.resolution",
    "train.sharding",
)


def proven(
    policy: DiffusersPolicy, options: RunOptions, items: Sequence[Item], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Prove ``policy`` unless that was done with the same weights, versions and options.

    All processes call it: a sharded transformer needs them all.

    Args:
        policy: Where it computes, before training.
        options: Resolved.
        items: Of the run. One of those with most references is drawn.
        before: What the run that is resumed has in its plan.json.

    Returns:
        What plan.json records; nothing of a policy of our own.

    Raises:
        PolicyLoadError: Its images are not the pipeline's.
    """
    name = policy_name(options.pretrained)
    if name in POLICIES.values():
        return {}
    subject = _subject(policy, options)
    # A class of the user's own may have been changed, or what it imports.
    if name == GENERIC and _is_same(before.get("of", {}), subject):
        logger.info("%s was proven with these weights, versions and options", policy.family)
        return dict(before)
    item = max(items, key=lambda item: item.num_references)
    small = math.lcm(_SMALL, policy.size_multiple)
    sizes = [(small, 2 * small)]
    for resolution in (options.train.resolution, options.test.resolution):
        sizes.append(at_size(item, resolution, options.item_size, policy).size)
    logger.info("comparing %s's images with those of its own call", policy.family)
    proof = prove(policy, item, sizes)
    logger.info("at most %d of 255 levels between them", proof.largest)
    return {"of": subject, "differences": [asdict(part) for part in proof.differences]}


def _subject(policy: DiffusersPolicy, options: RunOptions) -> dict[str, Any]:
    """What the proof holds for."""
    return {
        "model": identity(options.pretrained.model),
        "code": fingerprint(*_CODE),
        "device": policy.device.type,
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: attrgetter(name)(options) for name in _OF_IMAGES},
    }


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether both are known to be of the same weights, and equal in the rest."""
    weights = match(before.get("model"), now["model"])
    return weights is Match.SAME and {**before, "model": now["model"]} == now
