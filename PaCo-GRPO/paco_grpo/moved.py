"""Import paths of version 0.1 that no longer exist: importing one gives an error that names the new place."""

from __future__ import annotations

import importlib.abc
import sys

MOVED = {
    "transfer": "types",
    "policies.acceleration": "policies.performance.compile and policies.performance.attention",
    "policies.adapters": "policies.lora",
    "policies.cache": "policies.performance.cache",
    "policies.editing": "policies.reference_image",
    "policies.offload": "policies.performance.offload",
    "policies.pipeline": "policies.diffusers_policy",
    "policies.quantized": "policies.performance.quantize",
    "sampling.rollout": "sampling.denoise",
    "sampling.tail": "sampling.denoise (Tail, integrate)",
    "objectives.common": "objectives.base",
    "rewards.clip_text_image": "rewards.clip",
    "rewards.clipscore": "rewards.clip",
    "rewards.consistency": "rewards.judge",
    "rewards.editing": "rewards.judge",
    "rewards.grid_layout": "rewards.judge",
    "rewards.judging": "rewards.judge",
    "rewards.open_clip_model": "rewards.clip",
    "rewards.panels": "rewards.subfigures",
    "rewards.service": "rewards.remote.service",
    "rewards.subfig_clipI": "rewards.clip",
    "rewards.subfig_dreamsim": "rewards.dreamsim",
    "rewards.subfig_pairs": "rewards.subfigures",
    "rewards.wire": "rewards.remote.wire",
    "training.alone": "scripts/evaluate.py",
    "training.batch_size": "training.plan",
    "training.checkpoint": "checkpoint.files",
    "training.collect": "training.sample and sampling.images",
    "training.configuration": "options (read_options, options_to_yaml)",
    "training.decoding": "sampling.images",
    "training.ema": "checkpoint.state",
    "training.engine": "distributed.launch, distributed.processes and distributed.fsdp2",
    "training.evaluation": "evaluation.evaluate",
    "training.generator": "training.build (load_generator, load_adapter)",
    "training.health": "monitoring.health",
    "training.journal": "rewards.queue",
    "training.model_card": "checkpoint.model_card",
    "training.observe": "monitoring.observe",
    "training.pictures": "evaluation.pictures",
    "training.processes": "distributed.processes and distributed.launch",
    "training.reporting": "monitoring.console",
    "training.reward_sets": "training.build",
    "training.scoring": "rewards.queue",
    "training.setup": "training.build",
    "training.sharded": "distributed.processes",
    "training.speed": "training.build (apply_speed) and training.checks (check_device)",
    "training.state": "checkpoint.state",
    "training.texts": "training.checks (text_length)",
    "training.tracking": "monitoring.trackers",
    "training.zero": "distributed.zero",
}


class _MovedFinder(importlib.abc.MetaPathFinder):
    """Asked last, so only for modules that do not exist."""

    def find_spec(self, name, path=None, target=None):
        if name.removeprefix("paco_grpo.") in MOVED and name.startswith("paco_grpo."):
            new = MOVED[name.removeprefix("paco_grpo.")]
            place = new if new.startswith("scripts/") else f"paco_grpo.{new}"
            raise ModuleNotFoundError(f"{name} moved in version 0.2: see {place}", name=name)


sys.meta_path.append(_MovedFinder())
