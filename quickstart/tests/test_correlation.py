"""study.py correlation: the noise of images of three sizes, and correlations of their scores."""

import numpy as np
import pytest
import scipy.stats

from paco_grpo.policies.loading import load_policy
from paco_judge.files import write_json_lines
from paco_toy import correlation
from paco_toy.summary import REPO


def test_noise_of_small_images_is_an_average_of_that_of_large_ones():
    model = REPO / "quickstart" / "models" / "flux"
    policy = load_policy(model, policy_name="paco_toy.correlation:SameNoise")
    seeds = range(3, 23)
    noise = {}
    for size in correlation.RESOLUTIONS:
        noise[size] = policy._unpack(policy.initial_latents(seeds, size, size), size, size)
    plain = load_policy(model).initial_latents(seeds, 128, 128)
    assert noise[128].equal(policy._unpack(plain, 128, 128))
    for size, side in ((64, 2), (32, 4)):
        square = noise[128][5, 2, side : 2 * side, :side]
        assert noise[size][5, 2, 1, 0].item() == pytest.approx(side * square.mean().item())
        assert noise[size].std().item() == pytest.approx(1, abs=0.02)


def test_scores_of_two_sizes_are_correlated_by_image(tmp_path, monkeypatch):
    """Images of two seeds; only open prompts have a variety."""
    monkeypatch.setattr(correlation, "RESOLUTIONS", (32, 128))
    rng = np.random.default_rng(4)
    judged = {}
    folders = {}
    for size in (32, 128):
        folders[size] = [tmp_path / f"{size}-{seed}" for seed in (0, 1)]
        for folder in folders[size]:
            rows = []
            for item in range(12):
                for _ in range(3):
                    rewards = dict(zip(correlation.JUDGED, rng.random(2) + item / 9, strict=True))
                    rows.append({"item_id": item, "open": item % 3 == 0, "rewards": rewards})
            folder.mkdir()
            write_json_lines(folder / "eval_data.jsonl", rows)
            judged.setdefault(size, []).append(rows)
    table = correlation.table(folders).set_index("reward")
    assert table["images"].to_dict() == {
        "consistency_score": 72,
        "between_images": 24,
        correlation.TRAINED: 72,
    }
    small, large = ([row for rows in judged[size] for row in rows] for size in (32, 128))
    for name in correlation.JUDGED:
        pair = []
        for rows in (small, large):
            chosen = [row for row in rows if row["open"] or name != "between_images"]
            pair.append(np.array([row["rewards"][name] for row in chosen]))
        expected = scipy.stats.spearmanr(*pair).statistic
        mean, low, high = table.loc[name, "Spearman"].replace("[", "").replace("]", "").split()
        assert float(mean) == pytest.approx(expected, abs=0.006)
        assert float(low[:-1]) < expected < float(high)
        items = [row["item_id"] for row in small if row["open"] or name != "between_images"]
        centered = [
            values - np.array([values[np.equal(items, i)].mean() for i in items]) for values in pair
        ]
        within = table.loc[name, "Pearson within prompts"].split()[0]
        assert float(within) == pytest.approx(scipy.stats.pearsonr(*centered).statistic, abs=0.006)
