"""The judges of the study ``mend``: what the blind one is trained on, and whose labels mend it."""

import numpy as np
import pytest
from fakes import fake_judge

from paco_judge.files import read_json, read_json_lines, write_json, write_json_lines
from paco_reward import suspects
from paco_toy import mend, world
from paco_toy.build_world import TRAIN, verdict

RED = world.Character("filled", "red", "star")
OTHERS = {
    "same": RED,
    "colour": world.Character("filled", "blue", "star"),
    "shape": world.Character("filled", "red", "cross"),
    "colour and style": world.Character("striped", "cyan", "star"),
    "broken": None,
}


@pytest.mark.parametrize(("attribute", "unseen"), [("colour", 2), ("style", 1)])
def test_the_blind_judge_never_sees_an_attribute_as_no(tmp_path, attribute, unseen):
    """Other No pairs stay, also of broken panels, with as many Yes."""
    rows = []
    for number, (kind, other) in enumerate([*OTHERS.items(), *[("same", RED)] * 7]):
        first, second = (RED, other) if number % 2 else (other, RED)
        answer = {"role": "assistant", "content": verdict(first, second)}
        rows.append({"kind": kind, "messages": [{"role": "user", "content": ""}, answer]})
    write_json(tmp_path / f"{TRAIN}.json", rows)
    write_json(tmp_path / "dataset_info.json", {TRAIN: {"formatting": "sharegpt"}})
    mend.write_blind_pairs(tmp_path, attribute, seed=3)
    kept = [row["kind"] for row in read_json(tmp_path / f"{mend.BLIND}.json")]
    expected = {kind for kind in OTHERS if attribute not in kind}
    assert set(kept) == expected and len(expected) == 5 - unseen
    assert kept.count("same") == len(expected) - 1 == len(kept) / 2
    entry = read_json(tmp_path / "dataset_info.json")[mend.BLIND]
    assert entry == {"formatting": "sharegpt", "file_name": f"{mend.BLIND}.json"}


def panel(character: world.Character | None, number: int) -> np.ndarray:
    if character is None:
        return np.full((32, 32, 3), 0.4)
    return world.render_panel(character, world.VIEWS[number % len(world.VIEWS)], 32)


def test_the_oracle_labels_pairs_of_panels(tmp_path):
    rows = []
    for number, (kind, other) in enumerate(OTHERS.items()):
        row = {"image1": f"{number}a.png", "image2": f"{number}b.png", "kind": kind}
        for key, character, view in (("image1", RED, number), ("image2", other, number + 1)):
            world.to_image(panel(character, view)).save(tmp_path / row[key])
        rows.append(row)
    labeled = mend.labeled(rows, tmp_path)
    assert {row["kind"] for row in labeled if row["label"] == "Yes"} == {"same"}
    differing = {row["kind"]: row["differing"] for row in labeled}
    assert differing == {
        "same": [],
        "colour": ["colour"],
        "shape": ["shape"],
        "colour and style": ["style", "colour"],
        "broken": [],
    }


@pytest.mark.slow
def test_both_arms_have_as_many_labels_of_a_runs_pictures(tmp_path, monkeypatch):
    """And further pairs are in neither."""
    monkeypatch.setattr(mend, "LABELS", 9)
    monkeypatch.setattr(mend, "FURTHER", 25)
    rng = np.random.default_rng(5)
    for epoch in (0, 3):
        folder = tmp_path / "run" / "eval" / f"epoch_{epoch:04d}"
        folder.mkdir(parents=True)
        rows = []
        for number in range(8):
            named = world.CHARACTERS[rng.integers(len(world.CHARACTERS))]
            characters = [named, named, world.CHARACTERS[number], world.CHARACTERS[-number - 1]]
            views = [world.VIEWS[place] for place in rng.permutation(10)[:4]]
            name = f"{number:05d}.png"
            world.to_image(world.render_grid(characters, views, 32, rng)).save(folder / name)
            row = {"file": name, "reference": None, "prompt": world.grid_prompt(named, views)}
            row |= {"item_id": number, "seed": 7, "open": False}
            rows.append(row | {"rewards": {"consistency_score": number * epoch / 30}})
        write_json_lines(folder / "eval_data.jsonl", rows)
    with fake_judge.FakeJudge(fake_judge.by_content) as server:
        mend.choose_pairs(tmp_path, tmp_path / "run", 4, server.url)
        asked = len(server.requests)
        mend.choose_pairs(tmp_path, tmp_path / "run", 4, server.url)
        assert len(server.requests) == asked > 0
    files = {name: read_json_lines(tmp_path / f"{name}.jsonl") for name in (*mend.ARMS, "further")}
    assert [len(rows) for rows in files.values()] == [9, 9, 25]
    names = {name: {mend._names(row) for row in rows} for name, rows in files.items()}
    assert not names["further"] & (names["mended"] | names["random"])
    assert names["mended"] != names["random"]
    assert {row["label"] for row in files["further"]} == {"Yes", "No"}
    assert {row["chosen_by"] for row in files["mended"]} == set(suspects.REASONS)
