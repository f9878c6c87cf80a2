"""Names of the published code's options that are others here."""

_RESUME = "use config.resume_from: latest, or the folder of a checkpoint"
_DERIVED = (
    "derived from config.sample.unique_sample_num_per_epoch (prompts) and "
    "config.sample.num_images_per_prompt (images of each)"
)
_PROMPT_SET = "use config.prompt_fn: geneval_image or arrow_editing"

PUBLISHED = {
    "logdir": "use config.save_dir",
    "run_id": "use config.run_name",
    "resume_from_id": _RESUME,
    "resume_from_step": _RESUME,
    "resume_from_epoch": _RESUME,
    "pretrained.revision": (
        "give config.pretrained.model a folder: "
        "hf download NAME --revision REVISION --local-dir FOLDER"
    ),
    "sample.num_batches_per_epoch": _DERIVED,
    "sample.sample_num_per_epoch": _DERIVED,
    "train.gradient_accumulation_steps": (
        "derived from config.train.gradient_step_per_epoch and config.train.batch_size"
    ),
    "train.param_noise_std": "not available; see config.sample.noise_level",
    "train.guidance_scale": "use config.sample.guidance_scale",
    "train.cfg": "use config.sample.negative_prompt (None: no true CFG)",
    "train.timestep_fraction": "use config.train.timesteps, which are step indices",
    "enable_flexible_size": "use config.item_size: exact or aspect",
    "prompt_fn_kwargs": _PROMPT_SET,
    "test.aggregate_fn": "not needed: an evaluation reports each reward",
}
# Values of the published code, by option.
PUBLISHED_VALUES = {("prompt_fn", "general_editing"): _PROMPT_SET}
