"""Every option of a run, with its default. Named configurations (grpo.py) change some of them.

Nothing here is derived from another value: what follows from other values is computed after all overrides, from the
real number of processes, by ``paco_grpo.training.plan``. A value of None means what its comment says.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def open_dict(**entries) -> ConfigDict:
    """A table whose keys are the user's (reward names, import paths with dots), not fixed option names."""
    return ConfigDict(entries, allow_dotted_keys=True)


def get_config() -> ConfigDict:
    """The options common to all runs."""
    config = ConfigDict()
    config.project_name = "PaCo-RL"  # project in wandb / swanlab
    config.run_name = ""  # folder below save_dir; empty = "<configuration name>-<date and time>"
    config.seed = 42  # of samples, noise, shuffling and the adapter's start
    config.save_dir = "runs"  # runs lie in folders below it
    config.save_freq = 10  # epochs between checkpoints, 0 = only at the end
    config.eval_freq = 10  # epochs between evaluations, 0 = only at the end
    config.num_checkpoint_limit = 5  # the newest are kept
    config.resume_from = placeholder(str)  # "latest" or the path of a checkpoint
    config.num_epochs = 1000  # one epoch: sample, score, update
    config.max_train_minutes = placeholder(float)  # stop after so much time in training epochs; None = no limit
    config.logging_platform = "tensorboard"  # wandb | swanlab | tensorboard | none; metrics.jsonl is always written
    config.enable_mem_log = False  # peak memory in the metrics of every epoch

    config.dataset = ""  # folder of the prompt set
    config.prompt_fn = "geneval"  # kind of prompt set: geneval | general_ocr | text | geneval_image | arrow_editing
    config.item_size = "exact"  # as items say; aspect: their (or else their images') shape at the resolution's area
    config.max_sequence_length = 512  # text tokens; 0 = the longest prompt of the data set, up to a multiple of 64

    config.mixed_precision = "bf16"  # bf16 | no
    config.allow_tf32 = True  # TF32 in float32 matrix products of the GPU
    config.use_lora = True  # False: the whole transformer is trained
    config.enable_gradient_checkpointing = False  # less memory, one more forward in training
    config.per_prompt_stat_tracking = True  # advantages relative to the group of a prompt
    config.num_threads = placeholder(int)  # CPU threads per process; None = cores / processes

    config.pretrained = ConfigDict()
    config.pretrained.model = "black-forest-labs/FLUX.1-dev"  # diffusers folder or hub name
    config.pretrained.quantize = placeholder(str)  # nf4 | int8: the frozen transformer in few bits; changes numbers

    config.sample = _sample()
    config.train = _train()
    config.test = _test()
    config.health = _health()
    config.speed = _speed()
    return config


def _sample() -> ConfigDict:
    sample = ConfigDict()
    sample.num_steps = 10  # denoising steps
    sample.noise_steps = (1,)  # step indices at which noise is injected
    sample.num_noise_steps = placeholder(int)  # draw this many of noise_steps each epoch; None = all
    sample.noise_level = 0.7  # a of Flow-SDE, or of Flow-CPS (there 1 is all noise)
    sample.cps = False  # Flow-CPS instead of Flow-SDE
    sample.guidance_scale = 3.5  # embedded guidance, or the scale of true CFG
    sample.negative_prompt = placeholder(str)  # turns true CFG on (Qwen-Image-Edit); " " is enough
    sample.same_latent = False  # one initial noise per prompt
    sample.merge_lora = False  # merge the LoRA into the base for noiseless steps: faster, equal to rounding there
    sample.global_std = False  # divide advantages by the std over everything
    sample.batch_size = 1  # images per process and forward; 0 = from the memory that is free
    sample.num_images_per_prompt = 16  # k
    sample.unique_sample_num_per_epoch = 42  # m
    sample.reward_batch_size = placeholder(int)  # images per call of a reward; None = a whole sampling batch
    # What follows the last noise step of a rollout enters no log-probability, only the image: it may be approximate.
    sample.tail_steps = placeholder(int)  # fewer, larger steps there; None = those of the schedule
    sample.tail_order = 1  # 1 = Euler; 2 = second order from the velocities of two steps, at no further forward
    sample.tail_cache = 0.0  # first-block cache: threshold below which a forward reuses the last one's blocks; 0 = off
    sample.tail_weights = placeholder(str)  # "int8": 8-bit copies of the transformer's large layers (bitsandbytes)
    return sample


def _train() -> ConfigDict:
    train = ConfigDict()
    train.resolution = 512  # side in pixels of a square image of the area that is sampled and trained on
    train.batch_size = 1  # images per process and forward
    train.loss_type = "ppo"  # ppo | guard_grpo | nft
    train.learning_rate = 3e-4  # of AdamW, after the warm-up
    train.lr_warmup_steps = 0  # optimizer steps of linear warm-up
    train.adam_beta1 = 0.9  # of AdamW, as the next three
    train.adam_beta2 = 0.999  # decay of the second moment
    train.adam_weight_decay = 1e-4  # decoupled, times the learning rate
    train.adam_epsilon = 1e-8  # added to the root of the second moment
    train.use_8bit_adam = False  # AdamW's state in 8 bits, with bitsandbytes
    train.sharding = placeholder(str)  # fsdp2: divide the transformer over processes; None = as accelerate was started
    train.max_grad_norm = 1.0  # gradients are scaled down to this norm
    train.num_inner_epochs = 1  # passes over the samples of an epoch
    train.gradient_step_per_epoch = placeholder(int)  # optimizer steps an epoch; None = 1 for nft, else 2
    train.timesteps = placeholder(tuple)  # step indices trained on; None = the noise steps of the epoch
    train.clip_range = 1e-4  # of the ratio around 1 (ppo, guard_grpo)
    train.adv_clip_max = 5.0  # advantages are clipped to ± this
    train.beta = 0.0  # weight of the KL term
    train.nft_beta = 1.0  # β of nft: how far v+ and v- lie from the old velocity
    train.decay_type = placeholder(int)  # blending of the old adapter; None = 1 for nft, else 0
    train.old_log_prob = "auto"  # auto | rollout | recompute
    train.ema = True  # average of the trained weights, used in evaluation and saved adapters
    train.ema_decay = 0.9  # limit of the decay min((1+s)/(10+s), this) at optimizer step s
    train.ema_update_interval = 8  # optimizer steps
    train.lora_rank = 64  # width of the adapters
    train.lora_alpha = 128  # an adapter counts alpha/rank
    train.lora_path = placeholder(str)  # adapter to start from: folder or hub name, PEFT or diffusers format
    train.rank_grpo = False  # within-group ranks in place of rewards
    train.max_missing_reward_fraction = 0.1  # of an epoch's images; beyond it the run saves and stops
    train.stop_on_collapse = False  # save and stop at a sign of collapse (config.health); False = warn
    train.watch_test_rewards = False  # also score every epoch's samples by the rewards that only the test has
    train.reward_fn = open_dict()  # {name or package.module:factory: weight}
    train.reward_fn_kwargs = open_dict()  # {name: {keyword: value}}
    train.aggregate_fn = placeholder(object)  # name, package.module:function or a function; None = weighted sum
    train.aggregate_fn_kwargs = open_dict()  # arguments of a built-in aggregate_fn, such as threshold
    return train


def _health() -> ConfigDict:
    """Limits beyond which an epoch is warned of; what each means is in paco_grpo/training/health.py."""
    health = ConfigDict()
    health.probe_images = 4  # test items on which the distance to the base model is measured, one forward each; 0 = off
    health.max_velocity_change = 0.75  # of the base model's velocity
    health.max_contrast_change = 2.0  # factor up or down against the first epoch: images' contrast, latents' spread
    health.max_detail_change = 3.0  # factor up or down
    health.max_brightness_change = 0.25  # of 1
    health.min_distinctness = 0.25  # within groups, share of the first epoch's
    health.max_gradient_spike = 20.0  # times the median norm
    health.max_clip_share = 0.95  # in the optimizer steps after an epoch's first
    health.max_zero_std_share = 0.8  # of groups
    health.max_reward_divergence = 3.0  # standard errors
    return health


def _speed() -> ConfigDict:
    """How the same numbers are computed faster. What changes them, if only by rounding, is off unless asked for."""
    speed = ConfigDict()
    speed.compile = False  # torch.compile of the transformer's blocks: equal to rounding; the first epoch takes longer
    speed.attention = placeholder(str)  # an attention back end of diffusers, e.g. _native_cudnn; None = its default
    speed.fused_adam = placeholder(bool)  # one kernel for a whole AdamW step; None = on CUDA
    speed.offload_text_encoders = placeholder(bool)  # on the CPU while they encode nothing; None = on CUDA
    speed.offload_vae = False  # on the CPU while it decodes nothing
    speed.overlap_decode = placeholder(bool)  # decode a batch while the next one is sampled; None = on CUDA
    return speed


def _test() -> ConfigDict:
    test = ConfigDict()
    test.resolution = 1024  # side of a square image of the area that is evaluated
    test.batch_size = 1  # images per process and forward
    test.num_steps = 20  # denoising steps, all without noise
    test.at_start = True  # evaluate before the first update
    test.num_images = placeholder(int)  # None = one for each test item
    test.seed = placeholder(int)  # of the initial noise; None = config.seed
    test.save_eval_images = True  # False: only the contact sheet
    test.reward_fn = open_dict()  # empty = the training rewards
    test.reward_fn_kwargs = open_dict()  # a name that is absent here takes train.reward_fn_kwargs
    return test
