"""What the terminal shows before the first result: a few lines with what matters."""

import logging

from fakes import fake_judge
from tiny_run import tiny_options, write_prompts

from paco_grpo.training.build import build_run, record_start


def test_the_start_of_a_run_is_a_few_lines(tiny_flux_dir, tmp_path, caplog):
    """Of two prompt sets, of which one asks another judge."""
    caplog.set_level(logging.INFO)
    for name in ("grids", "pairs"):
        write_prompts(tmp_path / name)
    with fake_judge.FakeJudge() as first, fake_judge.FakeJudge() as second:
        judges = {
            "datasets__grids__reward_fn_kwargs__consistency_score__base_url": first.url,
            "datasets__pairs__reward_fn_kwargs__consistency_score__base_url": second.url,
        }
        options = tiny_options(
            tiny_flux_dir,
            tmp_path,
            **judges,
            dataset="",
            datasets__grids__folder=tmp_path / "grids",
            datasets__pairs__folder=tmp_path / "pairs",
            datasets__pairs__reward_fn__consistency_score=0.5,
            train__reward_fn='{"consistency_score": 2.0, "tiny_run:brightness": 3.0}',
            train__aggregate_fn="product_aggregate_fn",
            sample__unique_sample_num_per_epoch=3,
            eval_freq=7,
            num_epochs=11,
            max_train_minutes=13,
        )
        run = build_run(options, "mine_24gb")
        record_start(run)
        run.close()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) <= 11 and not any("\n" in line for line in lines)
    shown = "\n".join(lines)
    facts = [f"mine_24gb in {run.folder}", str(tiny_flux_dir), "by ppo", "product_aggregate_fn"]
    facts += ["grids: 2 consistency_score + 3 brightness", "pairs: 0.5 consistency_score"]
    facts += [f"{first.url}: consistency_score", f"{second.url}: consistency_score"]
    facts += ["3 prompts (grids 2, pairs 1) × 4 images = 12 at 16 px", "5 images at 32 px every 7"]
    facts += ["epoch 11, at most 13 minutes", f"report {run.folder}"]
    assert [fact for fact in facts if fact not in shown] == []
