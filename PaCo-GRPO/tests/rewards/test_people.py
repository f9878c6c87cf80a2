"""The page of votes: answers, undo, what a later run finds, and groups that teach nothing."""

import io
import math
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from tiny_run import tiny_options

from paco_grpo.advantages.groups import compute_advantages, weighted_sum
from paco_grpo.data.sets import prompt_sets
from paco_grpo.item import Item
from paco_grpo.options import ConfigError
from paco_grpo.rewards.contract import RewardRun
from paco_grpo.rewards.people import votes
from paco_grpo.rewards.sets import rewards_of
from paco_judge.errors import UserError
from paco_judge.files import read_json_lines

FOX = Item(4, "a fox")
EDIT = Item(7, "make it blue", references=(Image.new("RGB", (5, 3), "red"),))


def begun(folder, form="like", resumes=False, port=0):
    reward = votes(form, port)
    reward.begin(RewardRun(folder, 0, 1, lambda value: value, resumes))
    return reward


def show(reward, epoch, item, seeds, color="black"):
    """Each image is as wide as its seed."""
    images = [Image.new("RGB", (seed, 2), color) for seed in seeds]
    reward.show(images, [item] * len(seeds), seeds, epoch)


def address(reward):
    """That opens the page in a browser, with its key."""
    return reward._server.announcement().split()[1]


def names(reward):
    """Width of a picture → its name on the page."""
    found = {}
    for group in reward.page.state({})["groups"]:
        for picture in group["pictures"]:
            encoded = reward.page.picture(picture["name"])
            found[Image.open(io.BytesIO(encoded)).width] = picture["name"]
    return found


def test_likes_skips_and_undo(tmp_path):
    reward = begun(tmp_path)
    assert not reward.is_waiting()
    show(reward, 3, FOX, [10, 11])
    show(reward, 3, EDIT, [12, 13, 14])
    page = reward.page
    first, second = page.state({})["groups"]
    assert (first["prompt"], first["references"]) == ("a fox", [])
    (reference,) = second["references"]
    assert Image.open(io.BytesIO(page.picture(reference))).size == (5, 3)
    by_seed = names(reward)
    page.answer({"picture": by_seed[10], "answer": "like"})
    page.answer({"picture": by_seed[12], "answer": "skip"})
    page.answer({"picture": by_seed[13], "answer": "dislike"})
    page.answer({"picture": by_seed[13], "answer": "like"})
    assert page.undo({})["answered"] == 3
    show(reward, 3, EDIT, [12, 13, 14])  # sent again, as when the page's answer was lost
    by_seed = names(reward)
    with pytest.raises(UserError, match="best"):
        page.answer({"picture": by_seed[14], "answer": "best"})
    assert reward.is_waiting()
    page.answer({"picture": by_seed[14], "answer": "like"})
    page.answer({"picture": by_seed[11], "answer": "like"})
    assert not reward.is_waiting()
    # From here on, the answers are those that the training has.
    with pytest.raises(UserError):
        page.answer({"picture": by_seed[10], "answer": "dislike"})
    page.undo({})
    assert reward([None] * 2, [FOX] * 2, [11, 10], 3).tolist() == [1, 1]
    scores = reward([None] * 3, [EDIT] * 3, [14, 13, 12], 3)
    assert scores[:2].tolist() == [1, 0] and math.isnan(scores[2])
    state = page.state({})
    assert state["last"] == {"epoch": 3, "groups": 2, "left_out": 1, "votes": 4, "skips": 1}
    assert state["groups"] == []
    reward.close()


def test_best_and_worst_of_a_group(tmp_path):
    reward = begun(tmp_path, "best")
    show(reward, 1, FOX, [10, 11, 12, 13])
    show(reward, 1, EDIT, [20, 21])
    show(reward, 1, Item(9, "alone"), [30])
    by_seed = names(reward)
    with pytest.raises(UserError):
        reward.page.answer({"best": by_seed[10], "worst": by_seed[20]})
    reward.page.answer({"best": by_seed[12], "worst": by_seed[11]})
    assert reward.is_waiting()
    reward.page.answer({"picture": by_seed[21], "answer": "skip"})
    assert not reward.is_waiting()
    assert reward([None] * 4, [FOX] * 4, [10, 11, 12, 13], 1).tolist() == [0.5, 0, 1, 0.5]
    assert np.isnan(reward([None] * 2, [EDIT] * 2, [20, 21], 1)).all()
    reward.close()


def test_a_tab_takes_back_its_own_answers(tmp_path):
    reward = begun(tmp_path)
    show(reward, 2, FOX, [10, 11, 12])
    page = reward.page
    by_seed = names(reward)

    def answers():
        (group,) = page.state({})["groups"]
        return [picture["answer"] for picture in group["pictures"]]

    page.answer({"picture": by_seed[10], "answer": "like", "tab": "a"})
    page.answer({"picture": by_seed[11], "answer": "skip", "tab": "a"})
    page.answer({"picture": by_seed[11], "answer": "dislike", "tab": "b"})
    assert page.undo({"tab": "a"})["can_undo"]  # the other tab has answered this one since
    assert answers() == ["like", "dislike", None]
    assert not page.undo({"tab": "a"})["can_undo"]
    assert answers() == [None, "dislike", None]
    assert page.state({"tab": "b"})["can_undo"]
    page.undo({"tab": "b"})
    assert answers() == [None, "skip", None]
    reward.close()


def test_a_resumed_run_asks_about_pictures_that_are_others_now(tmp_path):
    """As with another number of steps: item, epoch and seed are the same."""
    reward = begun(tmp_path)
    show(reward, 5, FOX, [10, 11])
    show(reward, 5, EDIT, [20])
    by_seed = names(reward)
    for seed, answer in ((10, "like"), (11, "skip"), (20, "like"), (20, "dislike")):
        reward.page.answer({"picture": by_seed[seed], "answer": answer})
    reward.close()
    resumed = begun(tmp_path, resumes=True)
    show(resumed, 5, FOX, [10, 11], "blue")
    show(resumed, 5, EDIT, [20])
    groups = resumed.page.state({})["groups"]
    answers = [[picture["answer"] for picture in group["pictures"]] for group in groups]
    assert answers == [[None, None], ["dislike"]]
    resumed.close()


def test_what_a_later_run_finds(tmp_path):
    """A cut line is lost; answers of later epochs, and those of an earlier run, are set aside."""
    reward = begun(tmp_path)
    for epoch in (1, 2, 3):
        show(reward, epoch, FOX, [10 * epoch, 10 * epoch + 1])
        assert not reward.page.state({})["can_undo"]
        reward.page.answer({"picture": names(reward)[10 * epoch], "answer": "like"})
    reward.close()
    file = tmp_path / "votes.jsonl"
    file.write_bytes(file.read_bytes() + b'{"epoch": 2, "it')
    again = begun(tmp_path, resumes=True)
    show(again, 2, FOX, [20, 21])
    assert again.page.state({})["answered"] == 1
    again.page.answer({"picture": names(again)[21], "answer": "dislike"})
    assert not again.is_waiting()
    again.close()
    assert [row["seed"] for row in read_json_lines(file)] == [10, 20, 21]
    aside = tmp_path / "replaced_votes.jsonl"
    assert [row["seed"] for row in read_json_lines(aside)] == [30]
    other = begun(tmp_path)
    show(other, 1, FOX, [10])
    assert other.is_waiting()
    other.close()
    assert [row["seed"] for row in read_json_lines(aside)] == [30, 10, 20, 21]


def test_images_of_items_with_one_each_are_one_group(tmp_path):
    reward = begun(tmp_path)
    counts = []
    for epoch, seeds in ((1, [10]), (2, [20, 21])):
        show(reward, epoch, FOX, seeds)
        show(reward, epoch, EDIT, [30])
        assert reward.page.state({})["answered"] == 0  # also of a picture that another epoch had
        for width, name in names(reward).items():
            reward.page.answer({"picture": name, "answer": "dislike" if width == 30 else "like"})
        assert not reward.is_waiting()
        last = reward.page.state({})["last"]
        counts.append((last["groups"], last["left_out"]))
    assert counts == [(1, 0), (2, 2)]
    reward.close()


def test_when_the_next_pictures_come(tmp_path):
    """By what has been drawn, and else by how long the last epoch took."""
    reward = begun(tmp_path)

    def seconds_left():
        return reward.page.state({})["seconds_left"]

    started = [time.monotonic()]
    reward.follow("sampling", 0, 24)
    started.append(time.monotonic())
    time.sleep(0.1)
    reward.follow("sampling", 6, 24)
    least = 3 * (time.monotonic() - started[1])
    assert least <= seconds_left() <= 3 * (time.monotonic() - started[0])
    remaining = []
    for epoch in (1, 2):
        show(reward, epoch, FOX, [10])
        reward.page.answer({"picture": names(reward)[10], "answer": "like"})
        assert not reward.is_waiting()
        for _ in range(2):
            remaining.append(seconds_left())
            time.sleep(0.15)
    assert remaining[:2] == [None, None] and remaining[2] > remaining[3]
    reward.close()


def test_the_page_in_a_browser(tmp_path):
    """Keys alone suffice, also on 400 px; a second person, a reload, and the end of the run."""
    driver = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    reward = begun(tmp_path)
    show(reward, 5, FOX, [40, 41, 42])
    show(reward, 5, EDIT, [43, 44])

    def expect(tab, count):
        driver.expect(tab.locator("#count")).to_have_text(f"{count} of 5")
        driver.expect(tab.locator("#progress")).to_have_js_property("value", count)
        driver.expect(tab).to_have_title(f"({5 - count}) Votes")

    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tabs = []
        for _ in range(2):
            context = browser.new_context(viewport={"width": 400, "height": 800})
            tabs.append(context.new_page())
            tabs[-1].goto(address(reward))
            expect(tabs[-1], 0)
        first, second = tabs
        assert "key=" not in first.url
        for key in ("ArrowRight", "ArrowLeft", "d"):  # faster than the server answers
            first.keyboard.press(key)
        expect(first, 3)
        first.keyboard.press("Backspace")
        expect(first, 2)
        first.reload()
        expect(second, 2)
        # What a tab shows stays until it answers: the first picture, which was liked meanwhile.
        driver.expect(second.locator("figcaption")).to_have_text("liked")
        second.keyboard.press("s")
        driver.expect(second.locator("figcaption")).to_have_text("like it or not?")
        second.keyboard.press("ArrowDown")
        expect(first, 3)  # by itself
        for number, text in ((1, "disliked"), (2, "skipped")):
            first.locator("#overview button").nth(number).click()
            driver.expect(first.locator("figcaption")).to_have_text(text)
        assert first.locator("#prompt").text_content() == FOX.prompt
        first.locator("#buttons button").first.click()
        driver.expect(first.locator("#prompt")).to_have_text(EDIT.prompt)
        assert first.locator("#pictures figure.reference").count() == 1
        assert first.evaluate("document.documentElement.scrollWidth") <= 400
        second.keyboard.press("l")
        expect(first, 4)
        for key in "01":
            first.keyboard.press(key)
        driver.expect(second.locator("#count")).to_be_empty()  # all have an answer
        assert not reward.is_waiting()
        driver.expect(second.locator("#vote")).to_be_hidden()
        reward.follow("sampling", 3, 24)
        driver.expect(first.locator("#status")).to_contain_text("3 of 24")
        driver.expect(first.locator("#progress")).to_have_js_property("max", 24)
        reward.close()
        driver.expect(first).to_have_title("Votes (ended)")
        browser.close()
    rows = read_json_lines(tmp_path / "votes.jsonl")
    assert [row["answer"] for row in rows] == [
        "like",
        *["dislike"] * 2,
        None,
        *["skip"] * 2,
        "dislike",
        "like",
        "dislike",
        "like",
    ]


def test_undo_of_the_best_alone_leaves_the_group_before(tmp_path):
    driver = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    reward = begun(tmp_path, "best")
    show(reward, 2, FOX, [30, 31, 32])
    show(reward, 2, EDIT, [33, 34])
    show(reward, 2, Item(9, "alone"), [35])
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(address(reward))
        help_text = driver.expect(tab.locator("#help"))
        undo = tab.get_by_role("button", name="Undo")
        help_text.to_contain_text("best")
        driver.expect(undo).to_be_disabled()
        for key in "31":
            tab.keyboard.press(key)
        driver.expect(tab.locator("#count")).to_have_text("4 of 6")
        for take_back in (lambda: tab.keyboard.press("2"), undo.click):
            tab.keyboard.press("2")
            help_text.to_contain_text("worst")
            driver.expect(tab.locator("figure.best")).to_have_text("2 · best")
            take_back()
            help_text.to_contain_text("best")
            assert tab.locator("#notice").text_content() == ""
        driver.expect(tab.locator("#count")).to_have_text("4 of 6")
        tab.keyboard.press("1")
        tab.locator("#pictures img").last.click()
        driver.expect(tab.locator("#vote")).to_be_hidden()
        assert not reward.is_waiting()
        driver.expect(tab.locator("#status")).to_contain_text("2 of 3 groups teach")
        browser.close()
    assert reward([None] * 3, [FOX] * 3, [30, 31, 32], 2).tolist() == [0, 0.5, 1]
    assert reward([None] * 2, [EDIT] * 2, [33, 34], 2).tolist() == [1, 0]
    reward.close()


def test_a_port_that_is_taken_and_several_machines(tmp_path, monkeypatch):
    reward = begun(tmp_path)
    port = reward._server.port
    with pytest.raises(UserError, match=str(port)):
        begun(tmp_path / "other", port=port)
    reward.close()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="machine"):
        votes().begin(RewardRun(tmp_path, 0, 4, lambda value: value))


def test_groups_without_two_different_votes_teach_nothing(tiny_flux_dir, tmp_path):
    """A judge beside the votes does not change that; its missing scores count, skips do not."""
    nan = math.nan
    given = np.array([1, 0, 1, 1, nan, 0, nan, 1, 0, 1])
    judged = np.array([5, 7, 1, 2, 3, 4, 5, 6, 8, nan])
    item_ids = [3, 3, 5, 5, 5, 6, 6, 8, 8, 8]
    options = tiny_options(tiny_flux_dir, tmp_path)

    def sum_of(**grouped):
        return weighted_sum({"votes": 10.0, "judge": 1.0}, **grouped)

    result = compute_advantages(
        {"votes": given, "judge": judged},
        item_ids,
        [str(i) for i in item_ids],
        sum_of,
        options,
        ["votes"],
    )
    assert np.flatnonzero(result.kept).tolist() == [0, 1, 7, 8]
    assert result.advantages[[0, 1, 7, 8]].tolist() == [1, -1, 1, -1]
    assert result.stats["missing_share"] == 0.1 and result.stats["dropped_share"] == 0.6


@pytest.mark.parametrize("test_rewards", ["", '{"votes": 1.0, "tiny_run:redness": 0.0}'])
def test_evaluations_ask_nobody(tiny_flux_dir, tmp_path, test_rewards):
    rewards = '{"paco_grpo.rewards.people:votes": 1.0}'
    options = tiny_options(
        tiny_flux_dir, tmp_path, train__reward_fn=rewards, test__reward_fn=test_rewards
    )
    with pytest.raises(ConfigError, match="votes"):
        rewards_of(prompt_sets(options), "cpu", {"train": [FOX], "test": [FOX]})
