from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.sampling.schedule import sample_noise_steps


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 2**40), st.integers(0, 1000), st.data())
def test_steps_are_candidates_and_reproducible(candidates, seed, epoch, data):
    number = data.draw(st.integers(1, len(candidates)))
    chosen = sample_noise_steps(sorted(candidates), number, seed, epoch)
    assert len(chosen) == number == len(set(chosen)) and set(chosen) <= candidates and list(chosen) == sorted(chosen)
    assert chosen == sample_noise_steps(sorted(candidates, reverse=True), number, seed, epoch)
    assert sample_noise_steps(candidates, None, seed, epoch) == tuple(sorted(candidates))


def test_epochs_and_seeds_differ():
    by_epoch = {sample_noise_steps(range(10), 2, 42, epoch) for epoch in range(50)}
    by_seed = {sample_noise_steps(range(10), 2, seed, 0) for seed in range(50)}
    assert len(by_epoch) > 20 and len(by_seed) > 20
