"""One run in which no setting is a default or equal to another's: five epochs of two prompt sets, four
optimizer steps each, three evaluations, missing scores, a guard that falls, a resume.

All that it writes is computed again in NumPy, from the images that the rewards got. What matters
from the second epoch, optimizer step or evaluation on shows here.
"""

import json
import logging
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from reward_factories import grays
from tiny_run import rows_of, tiny_options, write_rows

from paco_grpo.commands.evaluate import results
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer
from paco_judge.files import read_json_lines

SEED = 7
TEST_SEED = 19
NAMES = ("look_consistency", "look_between_images", "guard")
CONSISTENCY, BETWEEN, GUARD = (f"{__name__}:{name}" for name in NAMES)
SETS = ("large", "small")  # the numbers 0 and 1
PROMPTS = (3, 1)  # of each set in an epoch
IMAGES = 4  # of a prompt
NUM_SAMPLES = IMAGES * sum(PROMPTS)
WEIGHTS = ({NAMES[0]: 2.0, NAMES[1]: 0.5}, {NAMES[0]: 3.0, NAMES[1]: -0.7})
GAINS = ({NAMES[0]: 2.0, NAMES[1]: 3.0, NAMES[2]: 1.5}, {NAMES[0]: 7.0, NAMES[1]: 3.0})
TEST_GAINS = ({NAMES[0]: 5.0, NAMES[2]: 1.5}, {NAMES[0]: 7.0, NAMES[1]: 3.0})
STEPS = 7
CANDIDATES = (0, 2, 4)  # of the noise steps, two of which an epoch has
NOISE_LEVEL = 0.6
MOST = 0.9  # absolute advantage
EMA_DECAY = 0.55
EMA_INTERVAL = 3
LEARNING_RATE = 0.004

# After so many epochs: a factor of scores, and how many images of a prompt lack one.
FACTORS = {
    NAMES[0]: (1.0, 1.1, 1.2, 1.6, 2.2),
    NAMES[1]: (1.0, 0.9, 1.1, -1.2, 0.9),
    NAMES[2]: (1.0, 1.1, 0.9, 0.94, 0.88),
}
LACKING = {
    "large train": (0, 1, 0, 1, 0),
    "small train": (0, 1, 0, 1, 2),
    "large test": (0,) * 5,  # it is not evaluated with this reward
    "small test": (0, 0, 0, 1, 0),
}
now = SimpleNamespace(epoch=0)  # what the rewards see


def scored(name, gain, images, items, epoch):
    """Scores of images; of those of one prompt, the darkest ones lack one by the second reward."""
    gray = grays(images)
    lengths = np.array([len(item.prompt) for item in items])
    scores = gain * (FACTORS[name][epoch] * (1 + gray / 255) + lengths / 100)
    if name == NAMES[1]:
        assert len({item.item_id for item in items}) == 1
        set_and_split = " ".join(items[0].prompt.split()[:2])
        lacking = LACKING[set_and_split][epoch]
        scores[np.argsort(gray)[:lacking]] = np.nan
    return scores


def reward(name, gain):
    def score(images, items):
        return scored(name, gain, images, items, now.epoch)

    score.compares_images = name == NAMES[1]
    return score


def look_consistency(gain):
    return reward(NAMES[0], gain)


def look_between_images(gain):
    return reward(NAMES[1], gain)


def guard(gain):
    return reward(NAMES[2], gain)


# --- the run --------------------------------------------------------------------------------------


def write_sets(folder):
    shapes = ((16, 16), (16, 24))
    for name, counts in (("large", (5, 4)), ("small", (2, 2))):
        for split, count in zip(("train", "test"), counts, strict=True):
            rows = []
            for number in range(count):
                prompt = (
                    f"{name} {split} {'x' * 5 * number} 1x2 grid. [LEFT]: a{number}. [RIGHT]: b."
                )
                height, width = shapes[number % 2]
                row = {"prompt": prompt, "height": height, "width": width, "open": number != 1}
                rows.append(row | {"category": f"{name[0]}{number % 2}"})
            write_rows(folder / name, split, rows)


def options_of(flux, folder, **changes):
    sets = {
        "small": {
            "folder": str(folder / "small"),
            "share": 0.5,
            "reward_fn": {CONSISTENCY: 3.0, BETWEEN: -0.7},
            "reward_fn_kwargs": {CONSISTENCY: {"gain": 7.0}},
        },
        "large": {
            "folder": str(folder / "large"),
            "share": 1.5,
            "test_reward_fn": {CONSISTENCY: 1.0, GUARD: 0.0},
            "reward_fn_kwargs": {GUARD: {"gain": 1.5}},
        },
    }
    changes = {
        "dataset": "",
        "datasets": json.dumps(sets),
        "item_size": "exact",
        "seed": SEED,
        "num_epochs": 4,
        "eval_freq": 3,
        "save_freq": 2,
        "num_checkpoint_limit": 1,
        "health__probe_images": 3,
        "sample__num_images_per_prompt": IMAGES,
        "sample__unique_sample_num_per_epoch": 4,
        "sample__same_latent": True,
        "sample__latents_per_prompt": 2,
        "sample__global_std": True,
        "sample__batch_size": 8,
        "sample__reward_batch_size": 3,
        "sample__num_steps": STEPS,
        "sample__noise_steps": ",".join(map(str, CANDIDATES)),
        "sample__num_noise_steps": 2,
        "sample__noise_level": NOISE_LEVEL,
        "sample__tail_steps": 1,
        "train__batch_size": 6,
        "train__gradient_step_per_epoch": 2,
        "train__num_inner_epochs": 2,
        "train__learning_rate": LEARNING_RATE,
        "train__adam_epsilon": 1e-3,
        "train__max_grad_norm": 500,
        "train__clip_range": 1e-3,
        "train__beta": 0.02,
        "train__adv_clip_max": MOST,
        "train__ema_decay": EMA_DECAY,
        "train__ema_update_interval": EMA_INTERVAL,
        "train__lora_rank": 3,
        "train__lora_alpha": 5,
        "train__max_missing_reward_fraction": 0.4,  # as one evaluation lacks
        "train__reward_fn": {CONSISTENCY: 2.0, BETWEEN: 0.5, GUARD: 0.0},
        "train__reward_fn_kwargs": {CONSISTENCY: {"gain": 2.0}, BETWEEN: {"gain": 3.0}},
        "test__reward_fn_kwargs": {CONSISTENCY: {"gain": 5.0}},
        "test__num_images": 10,
        "test__resolution": 24,
        "test__num_steps": 2,
        "test__seed": TEST_SEED,
    } | changes
    return tiny_options(flux, folder, **changes)


class Observer:
    """What a run does, by epoch from 0, beside what it writes."""

    def __init__(self, run):
        self.run = run
        self.images = defaultdict(dict)  # by position
        self.rollouts = {}
        self.advantages = {}
        self.losses = defaultdict(list)  # (optimizer step, Step, loss and metrics)
        self.norms = defaultdict(list)  # of the gradient, in each optimizer step
        self.starts = defaultdict(set)  # seeds of initial noise
        self.weights = []  # after each optimizer step
        self.averages = {}  # while an evaluation samples
        self.is_sampling = False
        self.saved = []  # after which epochs
        self.began = self.weight()
        state = run.state
        sample, update, loss = run.sampler.sample, run.updater.update, run.objective.loss
        initial_latents, seed_generators = state.policy.initial_latents, run.seed_generators

        def observed_sample(deliver, *others):
            def observed_deliver(images, items, numbers, seeds):
                self.images[state.epoch] |= dict(zip(numbers, images, strict=True))
                deliver(images, items, numbers, seeds)

            self.is_sampling = True
            self.rollouts[state.epoch] = sample(observed_deliver, *others)
            self.is_sampling = False
            return self.rollouts[state.epoch]

        def observed_update(rollouts, advantages, kept, *others):
            self.advantages[state.epoch] = advantages, kept
            return update(rollouts, advantages, kept, *others)

        def observed_loss(step, policy):
            output = loss(step, policy)
            metrics = {"loss": output.loss, **output.metrics}
            values = {name: value.detach().numpy() for name, value in metrics.items()}
            self.losses[state.epoch].append((state.optimizer_steps, step, values))
            return output

        def observed_latents(seeds, height, width):
            if self.is_sampling:
                self.starts[state.epoch] |= set(seeds)
            # The last one of an epoch is the evaluation's.
            self.averages[state.epoch] = self.weight()
            return initial_latents(seeds, height, width)

        save_epoch = run.checkpoints.save_epoch

        def observed_saving(*arguments):
            self.saved.append(state.epoch)
            return save_epoch(*arguments)

        def observed_seeding():
            now.epoch = state.epoch  # before each epoch and evaluation
            seed_generators()

        def before_step(*_):
            gradients = [p.grad.flatten() for p in state.parameters.values()]
            self.norms[state.epoch].append(float(torch.cat(gradients).norm()))

        run.sampler.sample = observed_sample
        run.updater.update = observed_update
        run.objective.loss = observed_loss
        state.policy.initial_latents = observed_latents
        run.seed_generators = observed_seeding
        run.checkpoints.save_epoch = observed_saving
        state.optimizer.register_step_pre_hook(before_step)
        state.optimizer.register_step_post_hook(lambda *_: self.weights.append(self.weight()))

    def weight(self):
        parameters = list(self.run.state.parameters.values())
        return parameters[-1].detach().double().numpy().copy()

    def samples(self, epoch):
        """The epoch's images: item, set, and scores by each reward, as NumPy says."""
        rollouts = self.rollouts[epoch]
        rows = []
        for position, item_id in enumerate(rollouts.item_ids):
            item = self.run.train_items[item_id]
            row = {"item_id": item_id, "dataset": item.dataset, "open": item.metadata["open"]}
            rows.append(row | {"image": self.images[epoch][position], "item": item})
        return with_scores(pd.DataFrame(rows), GAINS, epoch)


def with_scores(samples, gains, epoch):
    for name in NAMES:
        samples[name] = np.nan
    for members in samples.groupby("item_id").groups.values():
        of_prompt = samples.loc[members]
        for name, gain in gains[of_prompt["dataset"].iloc[0]].items():
            scores = scored(name, gain, list(of_prompt["image"]), list(of_prompt["item"]), epoch)
            samples.loc[members, name] = scores
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def seen(tiny_flux_dir, folder):
    write_sets(folder)
    run = build_run(options_of(tiny_flux_dir, folder))
    observer = Observer(run)
    observer.log = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: observer.log.append((run.state.epoch, record.getMessage()))
    logging.getLogger("paco_grpo").addHandler(handler)
    try:
        Trainer(run).fit()
    finally:
        logging.getLogger("paco_grpo").removeHandler(handler)
    observer.rows = rows_of(run.options, "train")
    observer.evaluations = rows_of(run.options, "eval")
    return observer


EPOCHS = pytest.mark.parametrize("epoch", range(4))


# --- sampling -------------------------------------------------------------------------------------


def test_when_a_run_evaluates_saves_and_how_it_counts(seen):
    rows = rows_of(seen.run.options)
    assert [(row["phase"][0], row["epoch"], row["step"]) for row in rows] == [
        ("e", 0, 0), ("t", 1, 4), ("t", 2, 8), ("t", 3, 12), ("e", 3, 12), ("t", 4, 16), ("e", 4, 16),
    ]  # fmt: skip
    plan = json.loads((seen.run.folder / "plan.json").read_text())
    assert plan["prompts_of_sets"] == dict(zip(SETS, PROMPTS, strict=True))
    names = {path.name for path in (seen.run.folder / "checkpoints").iterdir()}
    assert "epoch_0004" in names and "epoch_0002" not in names
    assert {2, 4} <= set(seen.saved) and 1 not in seen.saved


def test_each_epoch_has_its_prompts_noise_steps_and_noises(seen):
    chosen = []
    prompts_of_passes = []
    for epoch, rollouts in seen.rollouts.items():
        expected = np.random.default_rng([SEED, epoch]).choice(CANDIDATES, 2, replace=False)
        chosen.append(tuple(sorted(expected)))
        ids, counts = np.unique(rollouts.item_ids, return_counts=True)
        datasets = [seen.run.train_items[item].dataset for item in ids]
        assert (counts == IMAGES).all() and datasets == [0, 0, 0, 1]
        prompts_of_passes.append(ids[-1])
        for sample in rollouts.samples:
            recorded = tuple(step.index for step in sample.noise_steps)
            assert recorded == chosen[-1] and len(sample.sigmas) == STEPS + 1
        if chosen[-1][0] > 0:  # after a forward, whose last bits depend on the row in a batch
            continue
        for item in ids:
            numbers = np.flatnonzero(rollouts.item_ids == item)
            starts = {}
            for number in numbers:
                first = rollouts.samples[number].noise_steps[0].latents
                starts.setdefault(first.numpy().tobytes(), []).append(number)
            assert sorted(map(len, starts.values())) == [2, 2]
    assert len(set(chosen)) > 1
    # The only prompt of the small set in an epoch is the other one in the next.
    assert prompts_of_passes[0] != prompts_of_passes[1]
    assert prompts_of_passes[2] != prompts_of_passes[3]
    # Two initial noises of a prompt, others in each epoch.
    assert [len(starts) for starts in seen.starts.values()] == [2 * sum(PROMPTS)] * 4
    assert len(set.union(*seen.starts.values())) == 8 * sum(PROMPTS)
    seeds = [sample.seeds.item() for of in seen.rollouts.values() for sample in of.samples]
    assert len(set(seeds)) == 4 * NUM_SAMPLES


# --- scores and advantages ------------------------------------------------------------------------


@EPOCHS
def test_rewards_of_an_epoch(seen, epoch):
    samples = seen.samples(epoch)
    row = seen.rows[epoch]
    for name in NAMES:
        values = samples[name].dropna()
        assert row[f"reward/{name}_mean"] == pytest.approx(values.mean())
        assert row[f"reward/{name}_std"] == pytest.approx(values.std(ddof=0))
        for number, group in enumerate(SETS):
            of_set = samples[name][samples["dataset"] == number].dropna()
            if len(of_set) == 0:
                assert f"set/{group}/{name}_mean" not in row
                continue
            assert row[f"set/{group}/{name}_mean"] == pytest.approx(of_set.mean())
            error = of_set.std(ddof=1) / np.sqrt(len(of_set))
            assert row[f"set/{group}/{name}_stderr"] == pytest.approx(error)
    opened = samples[samples["open"]].groupby("item_id")[list(NAMES[:2])].mean()
    within, difference = opened.mean()
    assert row["reward/within_minus_between"] == pytest.approx(within - (1 - difference))


@EPOCHS
def test_advantages_of_an_epoch(seen, epoch):
    """Of each set's weighted rewards, by the spread over the set; then clipped, and trained."""
    samples = seen.samples(epoch)
    row = seen.rows[epoch]
    expected = np.zeros(NUM_SAMPLES)
    kept = np.zeros(NUM_SAMPLES, bool)
    totals_of_rows = defaultdict(list)
    for number, group in enumerate(SETS):
        of_set = samples[samples["dataset"] == number]
        total = sum(weight * of_set[name] for name, weight in WEIGHTS[number].items())
        present = total.dropna()
        means = present.groupby(of_set["item_id"][present.index]).transform("mean")
        advantages = (present - means) / present.std(ddof=0)
        expected[present.index] = advantages
        kept[present.index] = True
        statistics = {
            "missing_share": total.isna().mean(),
            "dropped_share": total.isna().mean(),
            "group_size_mean": len(present) / PROMPTS[number],
            "zero_std_share": 0,
            "mean_abs": advantages.abs().mean(),
        }
        assert statistics["missing_share"] == LACKING[f"{group} train"][epoch] / IMAGES
        for name, value in statistics.items():
            assert row[f"advantage/{group}/{name}"] == pytest.approx(value)
            totals_of_rows[name].append(value)
    for name, values in totals_of_rows.items():
        mean = np.average(values, weights=PROMPTS)
        place = "reward" if name == "missing_share" else "advantage"
        assert row[f"{place}/{name}"] == pytest.approx(mean)
    found, found_kept = seen.advantages[epoch]
    np.testing.assert_array_equal(found_kept, kept)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert np.abs(expected).max() > MOST


@EPOCHS
def test_what_an_epoch_is_trained_on(seen, epoch):
    """Each kept sample once in a pass and noise step, with its clipped advantage and its weight."""
    rollouts = seen.rollouts[epoch]
    advantages, kept = seen.advantages[epoch]
    position_of = {sample.seeds.item(): i for i, sample in enumerate(rollouts.samples)}
    indices = {step.index for step in rollouts.samples[0].noise_steps}
    trained = defaultdict(list)  # positions, by optimizer step and step of the schedule
    weights = defaultdict(float)
    for optimizer_step, step, _ in seen.losses[epoch]:
        positions = [position_of[seed] for seed in step.rollout.seeds.tolist()]
        trained[optimizer_step, step.index] += positions
        weights[optimizer_step] += step.weight * len(positions)
        clipped = advantages[positions].clip(-MOST, MOST)
        np.testing.assert_allclose(step.advantages.numpy(), clipped, rtol=1e-6)
        assert step.inner_epoch == (optimizer_step - 4 * epoch) // 2
    first = 4 * epoch
    assert set(trained) == {(first + step, index) for step in range(4) for index in indices}
    assert list(weights.values()) == pytest.approx([1.0] * 4)
    halves = np.array_split(np.arange(NUM_SAMPLES), 2)
    for index in indices:
        parts = [trained[first + step, index] for step in range(4)]
        for part, half in zip(parts[:2], halves, strict=True):
            assert sorted(part) == [position for position in half if kept[position]]
        assert sorted(parts[2] + parts[3]) == list(np.flatnonzero(kept))
        assert sorted(parts[2]) != sorted(parts[0])


@EPOCHS
def test_losses_of_an_epoch(seen, epoch):
    """Means over the samples of an optimizer step, and then over the steps."""
    row = seen.rows[epoch]
    totals = defaultdict(lambda: defaultdict(float))
    for optimizer_step, step, values in seen.losses[epoch]:
        for name, of_samples in values.items():
            totals[name][optimizer_step] += of_samples.astype(float).sum() * step.weight
    assert {"loss", "policy_loss", "kl", "ratio_deviation", "clip_share"} <= set(totals)
    for name, of_steps in totals.items():
        assert row[f"train/{name}"] == pytest.approx(np.mean(list(of_steps.values())), rel=1e-6)
    assert row["train/grad_norm"] == pytest.approx(np.mean(seen.norms[epoch]), rel=1e-5)
    first = [values for at, _, values in seen.losses[epoch] if at == 4 * epoch]
    assert all((values["ratio_deviation"] < 1e-6).all() for values in first)
    later = [values for at, _, values in seen.losses[epoch] if at == 4 * epoch + 3]
    assert max(values["ratio_deviation"].max() for values in later) > 1e-6
    is_first_update = epoch == 0
    assert all((values["kl"] == 0).all() == is_first_update for values in first)


# --- weights and evaluations ----------------------------------------------------------------------


def test_the_average_and_when_it_is_evaluated(seen):
    average = seen.began.copy()
    averages = [average]
    for step, weight in enumerate(seen.weights, start=1):
        if step % EMA_INTERVAL == 0:
            decay = min((1 + step) / (10 + step), EMA_DECAY)
            average = decay * average + (1 - decay) * weight
        averages.append(average)
    assert len(seen.weights) == 16
    state = seen.run.state
    np.testing.assert_allclose(list(state.ema.shadow.values())[-1].numpy(), average, rtol=1e-4)
    np.testing.assert_allclose(seen.averages[4], averages[16], rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(seen.weight(), seen.weights[-1])
    assert [group["lr"] for group in state.optimizer.param_groups] == [LEARNING_RATE]
    assert {float(entry["step"]) for entry in state.optimizer.state.values()} == {16.0}


@pytest.mark.parametrize("number", range(3))
def test_evaluations(seen, number):
    """The same seeds in each; the numbers are those of the saved images."""
    row = seen.evaluations[number]
    epoch = row["epoch"]
    folder = seen.run.folder / "eval" / f"epoch_{epoch:04d}"
    images = read_json_lines(folder / "eval_data.jsonl")
    items = {item.item_id: item for item in seen.run.test_items}
    samples = pd.DataFrame(images)
    samples["dataset"] = [SETS.index(name) for name in samples["dataset"]]
    samples["image"] = [Image.open(folder / file) for file in samples["file"]]
    samples["item"] = [items[item_id] for item_id in samples["item_id"]]
    samples = with_scores(samples, TEST_GAINS, epoch)
    assert samples["item_id"].tolist() == [0, 4, 1, 5, 2, 4, 3, 5, 0, 4]
    for place, record in enumerate(images):
        for name, score in record["rewards"].items():
            expected = samples.loc[place, name]
            assert (score is None) == np.isnan(expected)
            assert score is None or score == pytest.approx(expected)
    results(folder, None, None)
    tables = json.loads((folder / "results.json").read_text())["datasets"]
    missing = 0
    for group, of_set in samples.groupby("dataset"):
        of_prompts = of_set.groupby("item_id")[NAMES[0]].mean()
        measured = tables[SETS[group]]["results"]["adapter"][NAMES[0]]["mean"]
        assert measured == pytest.approx(of_prompts.mean())
        for name in TEST_GAINS[group]:
            values = of_set[name].dropna()
            place = f"set/{SETS[group]}/{name}"
            assert row[f"{place}_mean"] == pytest.approx(values.mean())
            error = values.std(ddof=1) / np.sqrt(len(values))
            assert row[f"{place}_stderr"] == pytest.approx(error)
        lacking = of_set[NAMES[1]].isna().mean() if group == 1 else 0
        missing += lacking * len(of_set)
        assert row.get(f"set/{SETS[group]}/{NAMES[1]}_missing", 0) == pytest.approx(lacking)
    assert missing == 2 * LACKING["small test"][epoch]
    assert row["eval/missing_share"] == pytest.approx(missing / 10)
    for name in NAMES:
        assert row[f"eval/{name}_mean"] == pytest.approx(samples[name].mean())
    repeats = samples.groupby("item_id").cumcount()
    for image, repeat in zip(images, repeats, strict=True):
        words = np.random.SeedSequence([21, TEST_SEED, image["item_id"], repeat])
        assert image["seed"] == int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))


def test_signs_compare_with_the_first_epochs_and_the_first_evaluation(seen):
    """The guard and the diversity fall slowly: only the last step brings them below their limits."""
    rows = seen.rows
    diversities = [1 - row["reward/between"] for row in rows]
    distinctness = [row["health/distinctness"] for row in rows]
    for epoch, row in enumerate(rows):
        latents = [
            sample.clean_latents.std(correction=0) for sample in seen.rollouts[epoch].samples
        ]
        assert row["health/latent_std"] == pytest.approx(np.mean(latents), rel=1e-5)
        spreads = [earlier["health/latent_std"] for earlier in rows[: epoch + 1]]
        ratios = {"latent_std": np.mean(spreads[-3:]) / spreads[0]}
        if epoch >= 3:
            for name, values in (("distinctness", distinctness), ("diversity", diversities)):
                ratios[name] = np.mean(values[epoch - 2 : epoch + 1]) / np.mean(values[:3])
        found = {name: row[name] for name in row if name.endswith("_vs_first")}
        expected = {f"health/{name}_vs_first": ratio for name, ratio in ratios.items()}
        assert found == pytest.approx(expected)
    assert rows[3]["health/diversity_vs_first"] < 0.5
    found = [
        (epoch, sign)
        for epoch, text in seen.log
        for sign in ("guard_mean", "diversity_vs_first")
        if sign in text
    ]
    assert found == [(4, "diversity_vs_first"), (4, "guard_mean")]


def test_an_evaluation_that_lacks_too_many_scores_of_one_set(seen, tiny_flux_dir, folder):
    """Of all images, fewer lack one than the limit."""
    now.epoch = 3
    changes = {"train__max_missing_reward_fraction": 0.3, "num_epochs": 0, "run_name": "other"}
    with pytest.raises(TrainingStopped, match="40% of the images of small in the evaluation"):
        Trainer(build_run(options_of(tiny_flux_dir, folder, **changes))).fit()


def test_a_fifth_epoch_after_a_resume(seen, tiny_flux_dir, folder):
    """It continues what epochs take in turn. Half of the small set's images then lack a score."""
    further = {"num_epochs": 5, "resume_from": "latest"}
    run = build_run(options_of(tiny_flux_dir, folder, **further))
    resumed = Observer(run)
    with pytest.raises(TrainingStopped, match="50% of the images of epoch 5 of small"):
        Trainer(run).fit()
    assert rows_of(run.options, "train") == seen.rows
    assert rows_of(run.options, "eval") == seen.evaluations
    (rollouts,) = resumed.rollouts.values()
    expected = np.random.default_rng([SEED, 4]).choice(CANDIDATES, 2, replace=False)
    for sample in rollouts.samples:
        assert [step.index for step in sample.noise_steps] == sorted(expected)
    seeds = {sample.seeds.item() for of in seen.rollouts.values() for sample in of.samples}
    assert not seeds & {sample.seeds.item() for sample in rollouts.samples}
    np.testing.assert_array_equal(resumed.weight(), seen.weight())
    assert not resumed.advantages and run.state.optimizer_steps == 16
    assert run.state.train_seconds == seen.run.state.train_seconds
