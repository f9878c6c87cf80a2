"""Two published ways to keep the images of a prompt apart, by ``train.diversity_features``."""

from collections.abc import Sequence

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import logsumexp


def perceptual_entropy_bonus(features: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """−log p of each image under a kernel density over the rest of its group (arXiv 2605.12112).

    p̂(fᵢ) = mean over j ≠ i of exp(−‖fᵢ − fⱼ‖² / 2h²), without the kernel's constant. h is the
    median distance of two images of one group, over all groups, so that a group that has collapsed
    gets a smaller bonus than the others. The paper leaves the bandwidth open; the median is our
    choice.

    ``features`` are (N, d), ``groups`` the positions of each group's images, at least two each.
    Returns (N,) float64; 0 for images in no group, and everywhere if all distances are 0.
    """
    squared = []
    pairs = [np.zeros(0)]
    for members in groups:
        unit = _unit(features[members])
        distances = cdist(unit, unit, "sqeuclidean")
        squared.append(distances)
        pairs.append(distances[np.triu_indices(len(distances), k=1)])
    pairs = np.concatenate(pairs)
    bonus = np.zeros(len(features))
    if not pairs.any():
        return bonus
    bandwidth = np.median(np.sqrt(pairs)) or np.sqrt(pairs.max())
    for members, distances in zip(groups, squared, strict=True):
        exponents = -distances / (2 * bandwidth**2)
        np.fill_diagonal(exponents, -np.inf)
        bonus[members] = np.log(len(members) - 1) - logsumexp(exponents, axis=1)
    return bonus


def nearest_neighbor_factors(features: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """Cosine distance of each image to its nearest neighbor in the group, over the group's mean.

    GARDO (arXiv 2512.24138) multiplies positive advantages by it. Arguments as above; (N,) float64,
    mean 1 within a group, 1 for images in no group and where all distances are 0.
    """
    factors = np.ones(len(features))
    for members in groups:
        unit = _unit(features[members])
        distances = 1 - np.clip(unit @ unit.T, -1, 1)
        np.fill_diagonal(distances, np.inf)
        nearest = distances.min(axis=1)
        if nearest.mean() > 1e-9:  # below, they differ by rounding
            factors[members] = nearest / nearest.mean()
    return factors


def _unit(features: np.ndarray) -> np.ndarray:
    features = np.asarray(features, np.float64)
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
