"""Each image is scored with its own item. That it is trained once in a pass, with its own advantage:
test_whole_run.py; that more processes change nothing: tests/distributed/test_strategies.py.

All items differ in prompt, some in shape, all images in noise, and the reward says what it was asked
about, so that an exchange, a repetition or an omission changes a number.
"""

from types import SimpleNamespace

import numpy as np
import torch
from tiny_run import sampled, tiny_options, write_rows

from paco_grpo.training.build import build_run

SHAPES = ((16, 16), (16, 32), (16, 16))  # of the items; two share their batches


def about(image, item):
    return 50 * item.item_id + len(item.prompt) + np.asarray(image.convert("L")).mean()


def answers():
    """What ``about`` says of each image and its item."""
    return lambda images, items: list(map(about, images, items))


def make(flux, folder, **changes):
    for split in ("train", "test"):
        rows = []
        for number, (height, width) in enumerate(SHAPES):
            prompt = f"{split} {'x' * number} 1x2 grid. [LEFT]: a{number}. [RIGHT]: b."
            rows.append({"prompt": prompt, "height": height, "width": width})
        write_rows(folder / "prompts", split, rows)
    reward = f"{__name__}:answers"
    changes = {
        "item_size": "exact",
        "health__probe_images": 0,
        "sample__unique_sample_num_per_epoch": 3,
        "sample__num_steps": 4,
        "sample__noise_steps": "0,2",
        "sample__batch_size": 4,
        "sample__reward_batch_size": 5,
        "train__batch_size": 2,
        "train__max_grad_norm": 1e9,
        "train__reward_fn": {reward: 1},
    } | changes
    return build_run(tiny_options(flux, folder, **changes))


def test_an_image_is_scored_with_its_own_item(tiny_flux_dir, tmp_path):
    run = make(tiny_flux_dir, tmp_path)
    rollouts, scores = sampled(run)
    samples = run.sampler.groups.samples(0)
    expected = []
    for number, sample in enumerate(rollouts.samples):
        position = rollouts.positions[number]
        assert sample.seeds.item() == samples.seeds[position]
        item = run.train_items[samples.item_ids[position]]
        assert (sample.item_ids.item(), sample.height, sample.width) == (
            item.item_id,
            item.height,
            item.width,
        )
        text = run.state.policy.encode([item]).prompt_embeds
        assert torch.equal(sample.conditioning.prompt_embeds, text)
        (image,) = run.state.policy.decode(sample.clean_latents, item.height, item.width)
        expected.append(about(image, item))
    assert np.diff(np.sort(expected)).min() > 1e-3
    np.testing.assert_allclose(scores[:, 0], expected, atol=5e-4)


def test_random_numbers_of_users_rewards_differ_between_processes_and_epochs(
    tiny_flux_dir, tmp_path
):
    run = make(tiny_flux_dir, tmp_path)
    randoms = []
    for process, run.state.epoch in ((0, 0), (1, 0), (0, 1), (0, 0)):
        run.state.strategy.accelerator = SimpleNamespace(process_index=process)
        run.seed_generators()
        randoms.append(np.random.random())
    assert len(set(randoms[:3])) == 3 and randoms[3] == randoms[0]
