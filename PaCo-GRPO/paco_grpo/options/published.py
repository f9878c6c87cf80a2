"""Options of the published code that have another name here, or follow from other options.

docs/real-weights.md shows the same table; a test compares them.
"""

_FROM_CHECKPOINT = "`config.resume_from`: `latest`, or the folder of a checkpoint"
_EPOCH_SIZE = (
    "derived: an epoch is `config.sample.unique_sample_num_per_epoch` prompts with "
    "`config.sample.num_images_per_prompt` images each"
)

PUBLISHED: dict[str, str] = {
    "logdir": "`config.save_dir`",
    "run_id": "`config.run_name`, the folder of the run",
    "resume_from_id": _FROM_CHECKPOINT,
    "resume_from_step": _FROM_CHECKPOINT,
    "resume_from_epoch": _FROM_CHECKPOINT,
    "pretrained.revision": "a folder in `config.pretrained.model`: `hf download NAME --revision REVISION --local-dir FOLDER`",
    "sample.num_batches_per_epoch": _EPOCH_SIZE,
    "sample.sample_num_per_epoch": _EPOCH_SIZE,
    "train.gradient_accumulation_steps": "derived from `config.train.gradient_step_per_epoch` and `config.train.batch_size`",
    "train.param_noise_std": "not available; `config.sample.noise_level` sets the exploration noise",
    "train.guidance_scale": "`config.sample.guidance_scale`: sampling and training use the same",
    "train.cfg": "`config.sample.negative_prompt`: None is without true CFG, a space is enough to turn it on",
    "train.timestep_fraction": "`config.train.timesteps`, the step indices to train on",
    "enable_flexible_size": "`config.item_size`: `exact` or `aspect`",
    "prompt_fn_kwargs": "not needed: `config.dataset` and `config.prompt_fn` name the prompt set",
    "prompt_fn=general_editing": "`geneval_image` (JSON lines with paths of images) or `arrow_editing` (tables with images)",
    "test.aggregate_fn": "not needed: an evaluation reports each reward of `config.test.reward_fn` by itself",
}
"""{option, or option=value, of the published code: what takes its place}"""
