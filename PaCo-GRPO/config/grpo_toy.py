"""The toy world of ../quickstart, on a CPU.

Use as config/grpo.py:NAME.
"""

from grpo_editing import kontext_editing
from grpo_t2is import without_noise
from ml_collections import ConfigDict

from paco_grpo.options import config_dict


def toy_t2is() -> ConfigDict:
    """Panels should agree, and images of a prompt differ.

    Half of the prompts leave part of the character open.
    """
    config = config_dict()
    toy(config)
    config.dataset = "../quickstart/out/world/prompts"
    config.pretrained.model = "../quickstart/models/flux"
    config.max_sequence_length = 32  # the toy model was built with it; the longest prompt has 31
    config.sample.latents_per_prompt = 4
    config.train.learning_rate = 1e-3
    # A LoRA of high rank on all linear layers is needed for images that differ (docs/rewards.md).
    config.train.lora_rank = 128
    config.train.lora_alpha = 256
    config.train.lora_targets = ".*"
    config.train.reward_fn = {
        "consistency_score": 1.0,
        "between_images": 8.0,
        "paco_toy.oracle:oracle_consistency": 0.0,  # monitored only
    }
    config.train.reward_fn_kwargs = {
        "consistency_score": {"model": "PaCo-Reward-Toy"},
        "between_images": {"model": "PaCo-Reward-Toy"},
    }
    config.train.aggregate_fn = "product_aggregate_fn"
    config.test.reward_fn = {
        "consistency_score": 1.0,
        "paco_toy.oracle:oracle_consistency": 1.0,
        "paco_toy.oracle:oracle_alignment": 1.0,
        "paco_toy.oracle:oracle_distinct": 1.0,
    }
    return config


def toy_t2is_nft() -> ConfigDict:
    """The quickstart: panels agree and choices stay open, where ppo learns little of either."""
    config = toy_t2is()
    without_noise(config)
    config.eval_freq = 16
    config.num_epochs = 16  # epochs end it, not the machine's speed
    config.train.loss_type = "nft"
    config.train.sigma_one = True
    return config


def toy_t2is_awm() -> ConfigDict:
    """As ``toy_t2is_nft``, and as long: its epochs are shorter."""
    config = toy_t2is()
    without_noise(config)
    config.eval_freq = 10
    config.num_epochs = 20
    config.train.loss_type = "awm"
    # The slow copy would be nearly what is trained, and cost a forward for each σ.
    config.train.awm_slow_beta = 0.0
    return config


def toy_t2is_sets() -> ConfigDict:
    """Two prompt sets, each with its own rewards: only open prompts are asked for variety."""
    config = toy_t2is_nft()
    folder = config.dataset
    config.dataset = ""
    config.train.reward_fn = {"consistency_score": 1.0}  # of sets that name no others
    config.datasets = {
        "full": {"folder": folder, "open": False, "share": 1.0},
        "open": {
            "folder": folder,
            "open": True,
            "share": 1.0,
            "reward_fn": {"consistency_score": 1.0, "between_images": 8.0},
        },
    }
    return config


def toy_kontext() -> ConfigDict:
    """The toy editor."""
    config = kontext_editing()
    toy_editing(config)
    config.pretrained.model = "../quickstart/models/flux_kontext"
    config.max_sequence_length = 8  # the toy model was built with it; an instruction has 5
    return config


def toy(config: ConfigDict) -> None:
    """Small models on a CPU: train at 64 px, evaluate at 128 px."""
    config.item_size = "aspect"
    config.mixed_precision = "no"
    config.eval_freq = 20
    config.num_epochs = 200
    config.max_train_minutes = 5.0  # ends it first
    config.num_checkpoint_limit = 2
    config.sample.num_steps = 6
    config.sample.batch_size = 64
    config.sample.unique_sample_num_per_epoch = 8
    config.sample.noise_steps = (1,)
    # Images of a group differ only by the noise that is trained on.
    config.sample.same_latent = True
    config.train.resolution = 64
    config.train.batch_size = 64
    config.train.learning_rate = 2e-3
    config.train.adam_beta2 = 0.99
    config.train.gradient_step_per_epoch = 1
    config.train.ema_update_interval = 1
    config.train.lora_rank = 8
    config.train.lora_alpha = 16
    config.test.resolution = 128
    config.test.batch_size = 32
    config.test.num_steps = 10
    config.test.num_images = 128


def toy_editing(config: ConfigDict) -> None:
    """Editing in the toy world. The toy judge cannot judge edits, so the oracle is the reward."""
    toy(config)
    config.dataset = "../quickstart/out/world/edits"
    config.prompt_fn = "geneval_image"
    config.train.reward_fn = {
        "paco_toy.edits:oracle_edit": 1.0,
        "paco_toy.edits:oracle_followed": 0.0,  # monitored only
        "paco_toy.edits:oracle_kept": 0.0,
    }
    config.train.reward_fn_kwargs = {}
    config.test.reward_fn = {}
    config.train.loss_type = "nft"  # short runs of ppo gained little
    config.train.timesteps = (1, 3)
    config.train.adv_clip_max = 1.0  # an advantage of one standard deviation counts fully
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.num_images_per_prompt = 8
    config.sample.unique_sample_num_per_epoch = 16
    config.test.resolution = 64  # the toy bases are better at it than at 128 px
