"""paco-reward rank: what people answer on the page, and what becomes of it."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from bench_tools import ContentJudge
from pairing_tools import build, noise, read_lines, rows, write_lines
from scipy.stats import friedmanchisquare, rankdata
from starlette.testclient import TestClient

from paco_eval import benchmark as benchmarks
from paco_eval import rank as rank_benchmark
from paco_judge.errors import UserError
from paco_judge.pages import page_app
from paco_reward.cli import main
from paco_reward.pairing import select
from paco_reward.pairing.inputs import Ranking
from paco_reward.rank import summary
from paco_reward.ranking import agreement, people, results, tasks
from paco_reward.ranking.page import RankPage

KEY = "some-key"


@pytest.fixture(scope="module")
def sets(world, tmp_path_factory) -> Path:
    """24 sets of three candidates; of five themes two are for testing."""
    output = tmp_path_factory.mktemp("sets") / "out"
    build(world, output, sets_only=True)
    return output


@pytest.fixture
def files(tmp_path) -> SimpleNamespace:
    """Five pairs and four edits with columns of their own."""
    pairs = []
    edits = []
    for number in range(5):
        first, second = f"{number}a.png", f"{number}b.png"
        noise(1, number).save(tmp_path / first)
        noise(2, number).save(tmp_path / second)
        pair = {"image1": first, "image2": second, "theme": f"fox {number}", "label": "Yes"}
        pairs.append(pair | {"chosen_by": f"reason {number}", "p_yes": 0.1 * number})
        edit = {"source": first, "edited": second, "instruction": f"turn it {number}"}
        edits.append(edit | {"task": number, "follows": "No"})
    (tmp_path / "in").mkdir()
    for row in pairs + edits:
        for name in {"image1", "image2", "source", "edited"} & row.keys():
            row[name] = f"../{row[name]}"
    return SimpleNamespace(
        pairs=write_lines(tmp_path / "in" / "pairs.jsonl", pairs),
        edits=write_lines(tmp_path / "in" / "edits.jsonl", edits[:4]),
        output=tmp_path / "people",
    )


class Visit:
    """A page in this process, and browsers that answer on it."""

    def __init__(self, stack, output, asked, sets=None):
        output.mkdir(exist_ok=True)
        self.output = output
        self.asked = asked
        self.sets = sets
        order = tasks.in_order(asked, 7)
        self.page = RankPage(order, output, self.finish, stack)
        app = page_app(self.page, KEY)
        self.http = TestClient(app, base_url="http://localhost")
        self.http.get("/", params={"key": KEY})

    def finish(self):
        self.found = results.write_results(self.output, self.asked, self.sets)
        return results.commands(self.output, self.sets)

    def state(self, name, tab="t"):
        return self.http.get("/state", params={"name": name, "tab": tab}).json()

    def post(self, name, question=None, path="/answer", tab="t", **answer):
        question = question or self.state(name, tab).get("question")
        body = {"name": name, "tab": tab, "question": question, "seconds": 2.5} | answer
        return self.http.post(path, json=body)

    def answer_all(self, name, decide):
        """``decide(state)`` -> the answer; returns the last state."""
        state = self.state(name)
        while state["kind"] != "end":
            response = self.post(name, state["question"], **decide(state))
            assert response.status_code == 200, response.text
            state = response.json()
        return state

    def task(self, state):
        return self.page._slots[state["question"]][0]

    def file(self, name):
        return read_lines(self.output / name)


@pytest.fixture
def visit():
    with ExitStack() as stack:
        yield lambda *arguments: Visit(stack, *arguments)


def order_of(page, state, names, *equal):
    """The answer that ranks the candidates ``names``, those of ``equal`` as one."""
    task = page.task(state)
    shown = []
    for picture in map(page.page.picture, state["pictures"][1:]):
        shown.append(task.row["comp_images"][task.pictures.index(picture) - 1])
    classes = []
    for candidate in names:
        if any(candidate in group and candidates_in(classes, shown, group) for group in equal):
            classes[-1].append(shown.index(candidate))
        else:
            classes.append([shown.index(candidate)])
    return {"order": classes}


def candidates_in(classes, shown, group):
    return bool(classes) and shown[classes[-1][0]] in group


def test_an_answer_is_on_the_disk_before_the_next_picture_and_a_later_call_goes_on(sets, tmp_path):
    asked = tasks.read_sets(sets)
    for sitting in range(3):
        with ExitStack() as stack:
            page = Visit(stack, tmp_path, asked)
            state = page.state("Ada")
            assert (state["done"], state["total"]) == (3 * sitting, 25)  # one is asked again
            for number in range(3):
                state = page.state("Ada")
                names = page.task(state).row["comp_images"]
                page.post("Ada", **order_of(page, state, names[::-1]))
                (*_, last) = read_lines(tmp_path / "answers" / "Ada.jsonl")
                assert last["answer"] == {"rank_images": names[::-1]}
                assert last["row"]["ref_image"] == page.task(state).row["ref_image"]
            assert page.state("Ada")["seconds_left"] == 2.5 * (22 - 3 * sitting)
            with (tmp_path / "answers" / "Ada.jsonl").open("a") as file:
                file.write('{"cut off')


def test_undo_skip_and_equal_ones(sets, tmp_path, visit):
    page = visit(tmp_path, tasks.read_sets(sets)[:4], sets)
    first = page.state("Ada")
    assert not first["can_undo"]
    assert page.post("Ada", skipped=True).json()["question"] != first["question"]
    undone = page.post("Ada", path="/undo").json()
    assert (undone["question"], undone["done"]) == (first["question"], 0)
    assert page.post("Ada", path="/undo").json()["question"] == first["question"]

    expected = []
    decided = iter(["skip", "order", "first two", "all"])

    def decide(state):
        kind = next(decided)
        if kind == "skip":
            return {"skipped": True}
        row = page.task(state).row
        names = row["comp_images"][1:] + row["comp_images"][:1]
        equal = {"order": [], "first two": [names[:2]], "all": [names]}[kind]
        expected.append(row | {"rank_images": names} | ({"equal": equal} if equal else {}))
        return order_of(page, state, names, *equal)

    end = page.answer_all("Ada", decide)
    assert any("--rankings" in command for command in end["commands"])
    written = page.file("rankings.jsonl")
    for ranking, wanted in zip(written, expected, strict=True):
        for group in (ranking, wanted):
            group["equal"] = [set(names) for names in group.get("equal", [])]
            if len(group["equal"]) and len(group["equal"][0]) == 3:
                group["rank_images"] = set(group["rank_images"])
        assert ranking | {"rank_images": 0} == wanted | {"rank_images": 0}
    assert written[0]["rank_images"] == expected[0]["rank_images"]
    assert len(page.file("answers/Ada.jsonl")) == 6  # with what was taken back
    page.post("Ada", path="/undo")
    page.post("Ada", skipped=True)
    assert len(page.file("rankings.jsonl")) == 2


@pytest.mark.parametrize(
    ("equal", "labels"),
    [
        ([], {"a": True, "d": False}),
        (["ab"], {"d": False}),
        (["bc"], {"a": True, "d": False}),
        (["bcd"], {"a": True}),
        (["ab", "cd"], {}),
        (["abcd"], {}),
    ],
)
def test_equal_ones_have_no_label(equal, labels):
    row = {"folder": "p", "ref_image": "r", "rank_images": list("abcd")}
    ranking = Ranking(**row, equal=[list(names) for names in equal])
    assert dict(select.labels_of_ranking(ranking, 1, 1, 0.1)) == labels
    if equal == ["ab"]:
        both = {"a": True, "b": True, "d": False}
        assert dict(select.labels_of_ranking(ranking, 2, 1, 0.1)) == both


def test_only_pictures_of_what_is_asked_are_served(sets, tmp_path, visit):
    page = visit(tmp_path, tasks.read_sets(sets)[:5])
    state = page.state("Ada")
    old = state["pictures"]
    for name, path in zip(old[:1], page.task(state).pictures, strict=False):
        assert page.http.get(f"/picture/{name}").content == path.read_bytes()
    for _ in range(3):
        page.post("Ada", skipped=True)
    now = page.state("Ada")["pictures"]
    gone = [name for name in old if name not in now + page.state("Ada")["load"]]
    assert gone
    assert {page.http.get(f"/picture/{name}").status_code for name in gone} == {404}
    assert page.http.get("/picture/..%2Fsets.jsonl").status_code == 404
    assert page.http.get(f"/picture/{state['question']}").status_code == 404


def test_one_name_in_two_tabs_and_two_people(sets, tmp_path, visit, monkeypatch):
    page = visit(tmp_path, tasks.read_sets(sets)[:3], sets)
    first = page.state("Ada", "one")
    assert not first["other_tab"]
    assert page.state("Ada", "two")["other_tab"]
    assert not page.state("Bob", "three")["other_tab"]
    names = page.task(first).row["comp_images"]
    answer = order_of(page, first, names)
    second = page.post("Ada", first["question"], tab="one", **answer).json()
    page.post("Ada", tab="one", **order_of(page, second, page.task(second).row["comp_images"]))
    other = order_of(page, first, names[::-1])
    replaced = page.post("Ada", first["question"], tab="two", **other).json()
    assert replaced["replaced"] and replaced["done"] == 2
    assert page.state("Bob")["done"] == 0
    page.finish()
    *_, ranking = page.file("rankings.jsonl")
    assert ranking["rank_images"] == names[::-1]
    assert page.post("Ada", path="/undo").json()["question"] == first["question"]
    monkeypatch.setattr("paco_reward.ranking.page._SEEN_S", 0)
    assert not page.state("Ada", "one")["other_tab"]


def test_a_name_in_another_case_is_the_same_person(sets, tmp_path):
    asked = tasks.read_sets(sets)[:4]
    for name, num_done in (("Ada", 0), ("ADA", 1), ("ada", 2)):
        with ExitStack() as stack:
            page = Visit(stack, tmp_path, asked)
            assert page.state(name)["done"] == num_done
            assert page.post(name, skipped=True).json()["name"] == "Ada"
    assert [file.name for file in (tmp_path / "answers").glob("*.jsonl")] == ["Ada.jsonl"]


def test_a_line_of_somebody_absent_that_was_cut_off_stops_nobody(files, visit):
    answers = files.output / "answers"
    answers.mkdir(parents=True)
    (answers / "Bob.jsonl").write_text('{"task": "some", "ag')
    page = visit(files.output, tasks.read_pairs(files.pairs, files.output))
    end = page.answer_all("Ada", lambda state: {"label": "No"})
    assert end["kind"] == "end" and len(page.file("pairs.jsonl")) == 5
    damaged = files.output / "damaged"
    (damaged / "answers").mkdir(parents=True)
    (damaged / "answers" / "Eve.jsonl").write_text('damaged\n{"task": "some"}\n')
    with ExitStack() as stack, pytest.raises(UserError, match="Eve"):
        Visit(stack, damaged, page.asked)


def test_rankings_of_pictures_that_are_others_now_do_not_count(sets, tmp_path, visit):
    """Those of sets that are only not asked any more do."""
    folder = Path(shutil.copytree(sets, tmp_path / "sets"))
    asked = tasks.read_sets(folder)
    with ExitStack() as stack:
        page = Visit(stack, tmp_path / "people", [asked[0], asked[9], asked[-1]], folder)
        page.answer_all(
            "Ada", lambda state: order_of(page, state, page.task(state).row["comp_images"])
        )
        assert len(page.file("rankings.jsonl")) == 3
    noise(5, 77).save(asked[-1].pictures[1])
    for name, key in (("sets.jsonl", "folder"), ("prompt_data.jsonl", "idx")):
        lines = read_lines(folder / name)
        write_lines(folder / name, [line for line in lines if line[key] != asked[9].row["folder"]])
    tasks._fingerprint.cache_clear()  # a later command
    page = visit(tmp_path / "people", tasks.read_sets(folder)[1:2], folder)
    page.finish()
    (ranking,) = page.file("rankings.jsonl")
    assert ranking["folder"] == asked[0].row["folder"]


def test_a_picture_that_is_gone_at_the_end_loses_no_answer(sets, tmp_path, visit):
    folder = Path(shutil.copytree(sets, tmp_path / "sets"))
    asked = [task for task in tasks.read_sets(folder) if task.part == "test"][:3]
    page = visit(tmp_path / "people", asked, folder)
    content = asked[0].pictures[0].read_bytes()
    asked[0].pictures[0].unlink()
    for _ in asked:
        state = page.state("Ada")
        response = page.post("Ada", **order_of(page, state, page.task(state).row["comp_images"]))
    assert response.status_code == 422 and asked[0].pictures[0].name in response.json()["error"]
    assert len(page.file("rankings.jsonl")) == 3
    asked[0].pictures[0].write_bytes(content)
    assert page.state("Ada")["kind"] == "end"
    assert len(page.file("benchmark/consistency_full_rank.jsonl")) == 3


def test_each_person_sees_candidates_in_an_order_of_their_own(sets):
    """And in another one when they are asked again."""
    asked = tasks.read_sets(sets)
    seen = []
    for name, again in (("Ada", False), ("Ada", True), ("Bob", False)):
        seen.append([tasks.shown_order(task, name, again) for task in asked])
    assert all(one != other for one, other in combinations(seen, 2))


@pytest.mark.parametrize(("count", "places"), [(9, []), (29, [20]), (30, [20, 31])])
def test_of_twenty_one_is_asked_again_after_some_others(count, places):
    """Of the rest, too, if there are ten; the seed decides the order."""
    asked = [tasks.Task(f"{number}", tasks.SET, (), "", {}) for number in range(count)]
    orders = [tasks.in_order(asked, seed) for seed in range(9)]
    for order in orders:
        repeats = [place for place, (_, again) in enumerate(order) if again]
        assert repeats == places
        for place in repeats:
            assert place - order.index((order[place][0], False)) > 5
    assert len({order[0][0].key for order in orders}) > 1


def test_the_time_left_is_estimated_from_the_last_answers(sets, tmp_path, visit):
    page = visit(tmp_path, tasks.read_sets(sets))
    seconds = [500, 600, *range(20, 1, -1), 95]
    for number in seconds:
        state = page.post("Ada", skipped=True, seconds=number).json()
    assert state["seconds_left"] == (state["total"] - state["done"]) * np.median(seconds[-20:])


def test_what_is_asked_twice_measures_a_person_and_changes_nothing(sets, tmp_path, visit):
    page = visit(tmp_path, tasks.read_sets(sets))
    seen = {}
    again = []

    def decide(state):
        task = page.task(state)
        assert "again" not in state
        names = task.row["comp_images"]
        if task.key in seen:
            again.append(task)
            names = [names[0], names[2], names[1]]
        seen.setdefault(task.key, names)
        return order_of(page, state, names)

    page.answer_all("Ada", decide)
    assert len(again) == 1
    own = page.found["people"]["Ada"]
    assert (own["answers"], own["asked_again"]) == (24, 1)
    assert own["with_themselves"] == {"share": pytest.approx(2 / 3), "n": 3}
    (row,) = (row for row in page.file("answers/Ada.jsonl") if row["again"])
    first, second, third = row["row"]["comp_images"]
    assert row["answer"]["rank_images"] == [first, third, second]
    page.answer_all("Bob", lambda state: {"skipped": True})
    ada, bob = summary(page.found)
    assert ada.endswith("the same answer when asked again: 0.67 of 3 comparisons")
    assert bob == "Bob: 24 answered, 24 of them skipped"
    assert len(page.file("answers/Bob.jsonl")) == 24  # and nothing again
    assert len(page.file("rankings.jsonl")) == 24
    for ranking in page.file("rankings.jsonl"):
        assert ranking["rank_images"] == ranking["comp_images"]


def test_the_majority_labels_pairs_and_edits_that_build_dataset_reads(files, visit):
    asked = tasks.read_pairs(files.pairs, files.output)
    asked += tasks.read_edits_of(files.edits, files.output)
    page = visit(files.output, asked)
    said = {  # of fox 0, fox 1, …: three people; then of edit 0, edit 1, …: consistency, follows
        "Ada": ["No", "No", "Yes", None, "No", ("Yes", "No"), ("No", "Yes"), None, ("No", None)],
        "Bob": ["Yes", "Yes", "No", "Yes", "No", ("No", "No"), ("No", None), ("Yes", "No"), None],
        "Eve": ["Yes", "No", None, "Yes", "Yes", ("Yes", "Yes"), None, ("Yes", "Yes"), None],
    }
    for name, answers in said.items():

        def decide(state, name=name, answers=answers):
            number = int(state["text"].split()[-1])
            if state["kind"] == "edit":
                answer = answers[5 + number]
                if answer:
                    return dict(zip(("consistency", "follows"), answer, strict=True))
                return {"skipped": True}
            answer = answers[number]
            if answer is None:
                return {"skipped": True}
            return {"label": answer, "reason": f"{name} said so here." if number < 2 else ""}

        page.answer_all(name, decide)
    pairs = {row["theme"]: row for row in page.file("pairs.jsonl")}
    labels = {theme: row["label"] for theme, row in pairs.items()}
    assert labels == {"fox 0": "Yes", "fox 1": "No", "fox 3": "Yes", "fox 4": "No"}
    assert pairs["fox 1"]["reason"] == "Ada said so here."
    assert "reason" not in pairs["fox 3"]
    assert (pairs["fox 3"]["chosen_by"], pairs["fox 3"]["p_yes"]) == ("reason 3", 0.1 * 3)
    assert page.file("answers/Eve.jsonl")[0]["row"].keys() >= {"chosen_by", "p_yes"}
    of_suspects, of_edits = results.commands(page.output, None)
    assert "--mend" in of_suspects and "--editing" in of_edits
    edits = {row["task"]: row for row in page.file("editing.jsonl")}
    labels = {}
    for task, row in edits.items():
        labels[task] = (row.get("consistency"), row.get("follows"))
    assert labels == {0: ("Yes", "No"), 1: ("No", "Yes"), 2: ("Yes", None), 3: ("No", None)}
    between = page.found["between_people"]
    share = {"share": pytest.approx(4 / 11), "n": 11}
    assert between["pair"] == {"tasks": 5, "pairwise": share, "answered": 5}
    share = {"share": pytest.approx(4 / 9), "n": 9}  # of labels that both gave
    assert between["edit"] == {"tasks": 3, "pairwise": share, "answered": 4}
    assert summary(page.found) == [
        "Ada: 9 answered, 2 of them skipped",
        "Bob: 9 answered, 1 of them skipped",
        "Eve: 9 answered, 3 of them skipped",
        "pairs: people agree on 0.36 of 11 comparisons",
        "edits: people agree on 0.44 of 9 comparisons",
    ]

    data = files.output / "data"
    stats = build(
        None, data, pairs=files.output / "pairs.jsonl", sets_per_prompt=None, test_share=0.0
    )
    assert stats["datasets"]["consistency_reward_train"]["pairs"] == 4
    answers = {row["messages"][1]["content"] for row in rows(data, "consistency_reward_train")}
    assert answers == {"Yes. Bob said so here.", "No. Ada said so here.", "Yes", "No"}
    stats = build(None, data, editing=files.output / "editing.jsonl", test_share=0.0)
    assert stats["counts"]["pairs_labeled"] == 6


def test_mending_reads_the_labels_of_an_editors_suspects(files, visit, data_dir, tmp_path):
    lines = [row | {"chosen_by": f"reason {row['task']}"} for row in read_lines(files.edits)]
    edits = tasks.read_edits_of(write_lines(files.edits, lines), files.output)
    page = visit(files.output, edits)

    def decide(state):
        number = int(state["text"].split()[-1])
        return {"consistency": ("Yes", "No")[number // 2], "follows": ("Yes", "No")[number % 2]}

    (command,) = page.answer_all("Ada", decide)["commands"]
    labeled = files.output / "editing.jsonl"
    assert f"build-dataset --mend {labeled} --output" in command
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    options = {"test_share": None, "sets_per_prompt": None}
    counts = build(None, data, mend=labeled, beside="pairs", **options)["counts"]
    assert counts["labels_for_training"] == 8


def test_refused_answers_leave_no_trace(sets, files, visit):
    page = visit(files.output, tasks.read_sets(sets)[:1])
    (files.output / "pairs").mkdir()
    other = visit(files.output / "pairs", tasks.read_pairs(files.pairs, files.output))
    for answer in ({}, {"order": [[0, 1]]}, {"order": [[0], [1], [1]]}, {"order": "012"}):
        assert page.post("Ada", **answer).status_code == 422
    for answer in ({}, {"label": "maybe"}, {"label": "No", "reason": "Yes, they are the same."}):
        assert other.post("Ada", **answer).status_code == 422
    assert other.post("Ada", label="No", reason="see <image>").status_code == 422
    assert page.post("Ada", "unknown", skipped=True).status_code == 422
    for name in ("", "a/b", "../Ada"):
        assert page.http.post("/answer", json={"name": name}).status_code == 422
    assert page.state("Ada")["done"] == other.state("Ada")["done"] == 0
    assert list(files.output.rglob("*.jsonl")) == sorted(files.output.rglob("answers/Ada.jsonl"))


@pytest.mark.parametrize(("count", "people"), [(3, 2), (4, 5), (6, 3)])
def test_kendalls_w_is_friedmans_statistic(count, people):
    """χ² = m (k − 1) W for m people and k candidates, also with equal ones."""
    random = np.random.default_rng(count)
    table = [rankdata(random.integers(0, 4, count)) for _ in range(people)]
    ranked = [dict(zip("abcdef", row, strict=False)) for row in table]
    expected = friedmanchisquare(*np.array(table).T).statistic / (people * (count - 1))
    assert agreement.kendalls_w(ranked) == pytest.approx(expected)


def test_a_skip_of_what_is_asked_again_is_no_skipped_answer():
    answered = {"kind": "pair", "answer": {"label": "No"}}
    skipped = {"kind": "pair", "answer": None}
    answers = {("a", False): answered, ("b", False): skipped, ("a", True): skipped}
    person = agreement.measure({"Ada": answers})["people"]["Ada"]
    assert (person["answers"], person["skipped"], person["asked_again"]) == (2, 1, 1)
    assert person["with_themselves"]["n"] == 0


def test_kendalls_w_of_those_who_agree_and_who_contradict():
    first = {"a": 1.0, "b": 2.0}
    assert agreement.kendalls_w([first, first, first]) == pytest.approx(1)
    assert agreement.kendalls_w([first, {"a": 2.0, "b": 1.0}]) == pytest.approx(0)
    assert agreement.kendalls_w([{"a": 1.5, "b": 1.5}] * 2) is None


def test_a_benchmark_of_themes_that_no_judge_is_trained_on(
    world, sets, tmp_path, visit, capsys, caplog
):
    """Its order is people's mean; with the same answers, build-dataset trains on other themes."""
    page = visit(tmp_path / "people", tasks.read_sets(sets), sets)
    for name, turn in (("Ada", [0, 1, 2]), ("Bob", [0, 2, 1]), ("Eve", [1, 0, 2])):

        def decide(state, turn=turn):
            names = page.task(state).row["comp_images"]
            return order_of(page, state, [names[place] for place in turn])

        page.answer_all(name, decide)
    concordance = page.found["between_people"]["set"]
    assert concordance["tasks"] == 24
    # Rank sums 4, 6, 8 of three people and three candidates.
    assert concordance["kendalls_w"] == {"mean": pytest.approx(12 * 8 / (9 * 24)), "n": 24}
    assert summary(page.found)[-1] == (
        "sets: people agree on 0.56 of 216 comparisons, Kendall's W 0.44 over 24 sets"
    )

    folder = page.output / "benchmark"
    ranked = read_lines(folder / "consistency_full_rank.jsonl")
    for row in ranked:
        assert row["rank_images"] == row["comp_images"]
    split = json.loads((sets / "split.json").read_text())["themes"]
    parts = {task.row["folder"]: task.part for task in page.asked}
    tested = {name for name, part in parts.items() if part == "test"}
    assert {row["folder"] for row in ranked} == tested
    assert 0 < len(tested) < len(parts) and set(split.values()) == {"train", "test"}
    build(world, sets, rankings=page.output / "rankings.jsonl", test_share=0.2, seed=3)
    trained = set()
    for row in rows(sets, "consistency_reward_train"):
        trained |= {Path(image).parts[1] for image in row["images"]}
    assert trained and not trained & tested
    assert "for testing in" not in caplog.text
    build(world, sets, rankings=page.output / "rankings.jsonl", test_share=0.0, name="all")
    num_kept = list(split.values()).count("test")
    assert f"{num_kept} themes and 0 images of the training pairs are for testing" in caplog.text

    judge = ContentJudge()
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarks, "make_engine", lambda args: judge)
        options = ["--dataset_dir", folder, "--model", tmp_path / "judge", "--question", "theme"]
        options += ["--results_dir", tmp_path / "results"]
        assert rank_benchmark.main(list(map(str, options))) == 0
    measured = read_lines(tmp_path / "results" / "judge-vtheme.jsonl")
    right = 0
    for row in measured:
        scores = dict(zip(row["comp_images"], row["scores"], strict=True))
        right += sum(scores[a] > scores[b] for a, b in combinations(row["rank_images"], 2))
    assert f"{right / (3 * len(measured)):.3f} (95 %" in capsys.readouterr().out


def test_the_interval_of_an_agreement():
    """Of two prompts with shares 1 and 1/2 by hand, and of prompts that all agree."""
    rows_of = []
    for folder, scores in (("a", [3, 2, 1]), ("b", [2, 1]), ("b", [1, 2])):
        names = list("xyz")[: len(scores)]
        row = {"folder": folder, "comp_images": names, "rank_images": names, "scores": scores}
        rows_of.append(row)
    # share 4/5; residuals 3 - 3·4/5 and 1 - 2·4/5; Student's t with one degree of freedom: 12.7
    text = rank_benchmark.agreement(rows_of)
    assert "0.800 (95 % interval 0.000 to 1.000)" in text
    wide = [row | {"folder": f"{row['folder']}{n}"} for n in range(8) for row in rows_of]
    residual = 0.6 * np.sqrt(16 / 15 * 16) / 40
    low = 0.8 - 2.1314 * residual
    assert f"0.800 (95 % interval {low:.3f} to" in rank_benchmark.agreement(wide)
    assert "interval" not in rank_benchmark.agreement(rows_of[1:])


def test_mean_rankings_keep_one_of_equal_candidates():
    answers = []
    for order in permutations("ab"):
        answers.append({"rank_images": [*order, "c"]})
    assert results.mean_ranking(answers) == ["a", "c"]
    answers.append({"rank_images": ["b", "a", "c"], "equal": [["b", "a", "c"]]})
    assert results.mean_ranking(answers) == ["a", "c"]
    answers.append({"rank_images": ["b", "a", "c"]})
    assert results.mean_ranking(answers) == ["b", "a", "c"]


def test_of_equal_candidates_one_is_in_the_benchmark(sets, tmp_path, visit):
    """A set of equal ones is not in it, nor is what was taken back."""
    tested = [task for task in tasks.read_sets(sets) if task.part == "test"]
    asked = {task.row["folder"]: task for task in tested}
    equal, ranked, *_ = asked
    page = visit(tmp_path, [asked[equal], asked[ranked]], sets)

    def decide(state):
        row = page.task(state).row
        names = row["comp_images"][::-1]
        return order_of(page, state, names, names if row["folder"] == equal else names[:2])

    page.answer_all("Ada", decide)
    folder = page.output / "benchmark"
    (row,) = read_lines(folder / "consistency_full_rank.jsonl")
    assert row["comp_images"] == row["rank_images"][::-1] and len(row["comp_images"]) == 2
    assert [prompt["idx"] for prompt in read_lines(folder / "prompt_data.jsonl")] == [ranked]
    page.post("Ada", path="/undo")
    page.post("Ada", path="/undo")
    page.answer_all("Ada", lambda state: {"skipped": True})
    assert page.file("rankings.jsonl") == []
    assert read_lines(folder / "consistency_full_rank.jsonl") == []


def test_problems_are_one_sentence_before_the_page_starts(sets, files, tmp_path, capsys):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "sets.jsonl").write_bytes((sets / "sets.jsonl").read_bytes())
    (moved / "prompt_data.jsonl").write_bytes((sets / "prompt_data.jsonl").read_bytes())
    alone = tmp_path / "alone"
    alone.mkdir()
    row = read_lines(sets / "sets.jsonl")[0]
    shutil.copytree(sets, tmp_path / "many")
    names = row["comp_images"] * 4
    nine, ten, one = (row | {"comp_images": names[:count]} for count in (9, 10, 1))
    write_lines(alone / "sets.jsonl", [one])
    write_lines(tmp_path / "many" / "sets.jsonl", [nine, ten])
    (alone / "prompt_data.jsonl").write_bytes((sets / "prompt_data.jsonl").read_bytes())
    wide = tmp_path / "wide.csv"
    wide.write_text("image1,image2\n0a.png,0b.png\n1a.png,1b.png,a fox, red\n")
    bare = write_lines(tmp_path / "bare.jsonl", [{"image1": "0a.png"}])
    gone = write_lines(tmp_path / "gone.jsonl", read_lines(files.pairs))
    for options, named in (
        (["--sets", moved], "images"),
        (["--sets", alone], "row 1"),
        (["--sets", tmp_path / "many"], "row 2"),
        (["--sets", tmp_path], "sets.jsonl"),
        (["--pairs", gone], "0a.png"),
        (["--pairs", wide], "row 2"),
        (["--pairs", bare], "image2"),
        ([], "--sets"),
    ):
        words = ["rank", "--output", str(files.output), *map(str, options)]
        assert main(words) == 1
        message = capsys.readouterr().err.strip().splitlines()
        assert len(message) == 1 and named in message[0]
    assert not files.output.exists()


def test_the_command_ends_with_its_files_and_refuses_a_taken_port(sets, files):
    """SIGTERM after one answer; a second command on its port, and one on its folder."""
    words = [sys.executable, "-m", "paco_reward.cli", "rank", "--port", "0", "--sets", str(sets)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    files.output.mkdir()
    first = [*words, "--pairs", str(files.pairs), "--output", str(files.output), "--seed", "3"]
    with subprocess.Popen(first, **options) as process:
        process.stdout.readline()
        address = process.stdout.readline().split()[1]
        with httpx.Client(base_url=address.split("/?")[0], trust_env=False) as http:
            http.get(address)
            state = http.get("/state", params={"name": "Ada"}).json()
            answer = {"name": "Ada", "question": state["question"], "order": [[2], [0], [1]]}
            assert http.post("/answer", json=answer).json()["done"] == 1
            port = address.split(":")[2].split("/")[0]
            for other, named in (
                ([*words[:5], port, *words[6:], "--output", f"{files.output}2"], port),
                (first, str(files.output)),
            ):
                refused = subprocess.run(
                    other, check=False, timeout=60, capture_output=True, text=True
                )
                assert refused.returncode == 1
                assert named in refused.stderr and len(refused.stderr.splitlines()) == 1
        process.terminate()
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and not errors
    assert "--rankings" in printed
    (ranking,) = read_lines(files.output / "rankings.jsonl")
    (asked, _), *_ = tasks.in_order(tasks.read_sets(sets), 3)
    assert ranking | asked.row == ranking
    assert (
        json.loads((files.output / "agreement.json").read_text())["people"]["Ada"]["answers"] == 1
    )


def test_answers_to_an_earlier_file_stay_in_the_results(files, visit, tmp_path):
    pairs = tasks.read_pairs(files.pairs, files.output)
    with ExitStack() as stack:
        page = Visit(stack, files.output, pairs[:2])
        page.answer_all("Ada", lambda state: {"label": "No"})
    later = visit(files.output, pairs[2:])
    assert not later.state("Ada")["can_undo"]
    later.post("Ada", path="/undo")  # of what is asked now there is nothing
    later.answer_all("Bob", lambda state: {"label": "Yes"})
    labels = {row["theme"]: row["label"] for row in later.file("pairs.jsonl")}
    yes = dict.fromkeys(("fox 2", "fox 3", "fox 4"), "Yes")
    assert labels == yes | {"fox 0": "No", "fox 1": "No"}


@pytest.mark.parametrize("kind", ["pairs", "edits"])
def test_labels_of_pictures_that_are_gone_or_others_now_do_not_count(
    files, visit, tmp_path, caplog, kind
):
    """Those of rows that are only not asked any more do."""
    read = {"pairs": tasks.read_pairs, "edits": tasks.read_edits_of}[kind]
    file = getattr(files, kind)
    lines = read_lines(file)
    with ExitStack() as stack:
        page = Visit(stack, files.output, read(file, files.output))
        page.answer_all("Ada", lambda state: {"label": "No", "consistency": "Yes"})
    (tmp_path / "0a.png").unlink()
    noise(5, 78).save(tmp_path / "1b.png")
    tasks._fingerprint.cache_clear()  # a later command
    write_lines(file, [lines[1], lines[3]])
    page = visit(files.output, read(file, files.output))
    page.answer_all("Ada", lambda state: {"skipped": True})
    results_file = {"pairs": "pairs.jsonl", "edits": "editing.jsonl"}[kind]
    labeled = {int((row.get("theme") or row["instruction"])[-1]) for row in page.file(results_file)}
    assert labeled == set(range(2, len(lines)))
    assert "0a.png" in caplog.text and "1b.png" in caplog.text


def test_both_orders_of_a_pair_are_one_question(files):
    lines = read_lines(files.pairs)
    turned = lines[1] | {"image1": lines[1]["image2"], "image2": lines[1]["image1"]}
    other = lines[2] | {"theme": "an owl"}
    file = write_lines(files.pairs.parent / "more.jsonl", [*lines, turned, other])
    assert len(tasks.read_pairs(file, files.output)) == 6
    same = write_lines(files.pairs, [lines[0] | {"image2": lines[0]["image1"]}])
    with pytest.raises(UserError, match="row 1"):
        tasks.read_pairs(same, files.output)


def test_a_folder_that_moves_keeps_its_answers(files, visit, tmp_path):
    before = tasks.read_pairs(files.pairs, files.output)
    with ExitStack() as stack:
        Visit(stack, files.output, before).answer_all("Ada", lambda state: {"label": "No"})
    home = tmp_path / "elsewhere" / "deeper"
    home.mkdir(parents=True)
    for file in tmp_path.glob("*.png"):
        file.rename(home.parent / file.name)
    files.pairs.rename(home / "pairs.jsonl")
    after = tasks.read_pairs(home / "pairs.jsonl", files.output)
    page = visit(files.output, after)
    assert page.state("Ada")["kind"] == "end"
    for row in page.file("pairs.jsonl"):
        assert (files.output / row["image1"]).is_file()


def test_current_answers_of_a_file():
    def row(task, answer, again=False, **more):
        return {"task": task, "again": again, "answer": answer} | more

    lines = [row("a", 1), row("b", 2), row("c", 5), row("a", 3), row("a", 4, True)]
    lines.append(row("b", None, undo=True))
    answers = people.current_answers(lines)
    found = {slot: line["answer"] for slot, line in answers.items()}
    assert list(found.items()) == [(("c", False), 5), (("a", False), 3), (("a", True), 4)]


def sides(output, name):
    """train or test of each image of a data set."""
    found = {}
    for part in ("train", "test"):
        for row in rows(output, f"{name}_{part}"):
            found |= dict.fromkeys(row["images"], part)
    return found


@pytest.mark.parametrize("kind", ["pairs", "editing"])
def test_rows_that_come_later_leave_the_split_as_it_was(tmp_path, kind):
    """New pairs may link an image of training with one for testing: they are left out."""
    names = ("image1", "image2") if kind == "pairs" else ("source", "edited")
    lines = []
    for number in range(24):
        noise(4, number).save(tmp_path / f"{number}.png")
    for number in range(0, 20, 2):
        line = {names[0]: f"{number}.png", names[1]: f"{number + 1}.png"}
        label = ("Yes", "No")[number // 2 % 2]
        if kind == "pairs":
            lines.append(line | {"label": label, "theme": f"fox {number}"})
        else:
            lines.append(line | {"follows": label, "instruction": f"turn {number}"})
    options = {"test_share": 0.3, "sets_per_prompt": None}
    file = write_lines(tmp_path / "rows.jsonl", lines)
    build(None, tmp_path / "out", **{kind: file}, **options)
    name = "consistency_reward" if kind == "pairs" else "sharegpt_editing"
    before = sides(tmp_path / "out", name)
    assert set(before.values()) == {"train", "test"}

    new = []
    for first in range(20):  # each with image 20, which can be on one side only
        row = lines[first % 10] | {names[0]: f"{first}.png", names[1]: "20.png"}
        new.append(row)
    write_lines(file, [*new, *lines[:3], *lines[4:]])  # one of them is taken back
    counts = build(None, tmp_path / "out", **{kind: file}, **options, seed=6)["counts"]
    after = sides(tmp_path / "out", name)
    assert 0 < counts["across_the_split"] < len(new)
    for image in before.keys() & after.keys():
        assert after[image] == before[image]

    strange = [row | {names[0]: "22.png", names[1]: "23.png"} for row in lines[:1]]
    for others in (strange, [lines[0] | {"theme": "another", "instruction": "another"}]):
        with pytest.raises(UserError, match="out was built"):
            build(None, tmp_path / "out", **{kind: write_lines(file, others)}, **options)
