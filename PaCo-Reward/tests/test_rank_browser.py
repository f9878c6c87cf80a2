"""paco-reward rank in a real browser, by its keys alone.

It needs `pip install playwright` and a Chromium that is installed (`apt install chromium`).
"""

import re
import shutil
from contextlib import ExitStack

import pytest
from pairing_tools import build, noise, read_lines, write_lines

from paco_judge.pages import PageServer, page_app
from paco_reward.ranking import results, tasks
from paco_reward.ranking.page import RankPage

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture
def served(world, tmp_path):
    """Address, output and page: two sets, a pair and an edit whose pictures have four widths."""
    output = tmp_path / "people"
    output.mkdir()
    build(world, tmp_path / "sets", sets_only=True, sets_per_prompt=1)
    for number in range(4):
        noise(3, number, width=64 + 32 * number).save(tmp_path / f"{number}.png")
    pair = {"image1": "0.png", "image2": "1.png", "theme": "two foxes"}
    edit = {"source": "2.png", "edited": "3.png", "instruction": "make it blue"}
    asked = tasks.read_sets(tmp_path / "sets")[:2]
    asked += tasks.read_pairs(write_lines(tmp_path / "pairs.jsonl", [pair]), output)
    asked += tasks.read_edits_of(write_lines(tmp_path / "edits.jsonl", [edit]), output)

    def finish():
        results.write_results(output, asked, tmp_path / "sets")
        return results.commands(output, tmp_path / "sets")

    with ExitStack() as stack:
        page = RankPage(tasks.in_order(asked, 5), output, finish, stack)
        with PageServer(lambda key: page_app(page, key), port=0) as server:
            yield server.announcement().split()[1], output, page


@pytest.fixture
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A tab of a browser, whose scripts must raise nothing."""

    def __init__(self, context):
        self.context = context
        self.tab = context.new_page()
        self.errors = []
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))

    def enter(self, address, name):
        self.tab.goto(address)
        self.tab.keyboard.type(name)
        self.tab.keyboard.press("Enter")
        self.shows(0)

    def press(self, keys):
        for key in keys:
            self.tab.keyboard.press(key)

    def poll(self):
        """Asks for the state, as every few seconds."""
        with self.tab.expect_event("requestfinished") as request:
            self.tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert "/state" in request.value.url
        self.tab.wait_for_timeout(100)

    def is_told(self, text):
        """A part of the notice; "": there is none."""
        expected = re.compile(re.escape(text) or "^$")
        playwright.expect(self.tab.locator("#notice")).to_have_text(expected)

    def ends(self):
        self.tab.wait_for_function("() => state.kind === 'end'")

    def widths(self):
        """The pictures' widths by what is written about them."""
        images = "[...document.images].map(image => [image.alt, image.naturalWidth])"
        return dict(self.tab.evaluate(images))

    def shows(self, done):
        """Waits for so many answers, and for all pictures."""
        self.tab.wait_for_function(
            "done => state && state.done === done && "
            "[...document.querySelectorAll('img.picture')].every(i => i.naturalWidth > 0)",
            arg=done,
        )


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_keys_alone(served, browser, scheme, width):
    """Answers, undo, reload, a second person, a second tab, the end."""
    address, output, page = served
    screen = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme}
    ada = Tab(browser.new_context(**screen))
    ada.enter(address, "Ada")
    assert "key" not in ada.tab.url
    ada.press("21")
    ada.shows(1)
    ada.press("u")
    ada.shows(0)
    last = page.picture(ada.tab.get_attribute("img[alt='Picture 1']", "src").split("/")[-1])
    ada.tab.locator(".choice").nth(1).click()
    ada.press("=3")  # the last follows by itself
    ada.shows(1)
    ada.tab.reload()
    ada.shows(1)
    assert ada.tab.inner_text("#notice") == ""

    bob = Tab(browser.new_context(**screen))
    bob.enter(address, "Bob")
    bob.press("r")
    bob.shows(1)
    again = Tab(ada.context)
    again.tab.goto(address.split("?")[0])
    again.press(["Enter"])
    again.shows(1)
    assert "Ada" in again.tab.inner_text("#notice")

    ada.press("s")
    ada.shows(2)
    assert ada.widths() == {"First": 64, "Second": 96}
    again.poll()
    again.press("s")  # of the question that it still shows
    again.is_told("answered before, in another tab")
    ada.tab.bring_to_front()
    ada.press("w")
    ada.tab.keyboard.type("only one has a tail")
    ada.press(["Enter"])
    ada.tab.locator("button", has_text="No").click()
    ada.shows(3)
    assert ada.widths() == {"Original": 128, "Edit": 160}
    ada.tab.locator(".ask").nth(1).locator("button", has_text="No").click()
    ada.press("y")
    ada.ends()
    ada.press("u")
    ada.shows(3)
    ada.press("y")
    ada.tab.locator("button", has_text="Skip").click()  # this question alone, as its key does
    ada.ends()
    assert "--pairs" in ada.tab.inner_text("#commands")
    fits = "document.documentElement.scrollWidth <= innerWidth"
    for tab in (ada, bob, again):
        assert tab.errors == [] and tab.tab.evaluate(fits)

    (pair,) = read_lines(output / "pairs.jsonl")
    assert (pair["label"], pair["reason"]) == ("No", "only one has a tail")
    (edit,) = read_lines(output / "editing.jsonl")
    assert edit["consistency"] == "Yes" and "follows" not in edit
    *_, undone, _, _ = answers = read_lines(output / "answers" / "Ada.jsonl")
    assert undone["answer"] == {"consistency": "Yes", "follows": "No"}
    assert all(answer.get("seconds", 0) < 30 for answer in answers)
    of_ada, of_bob = read_lines(output / "rankings.jsonl")
    assert last.match(of_ada["rank_images"][-1])
    assert (len(of_ada["equal"][0]), len(of_bob["equal"][0])) == (2, 3)


def test_errors_stay_until_an_answer_is_accepted(served, browser):
    """That of a lost connection goes when the server answers again."""
    address, *_ = served
    ada = Tab(browser.new_context())
    ada.tab.goto(address)
    ada.tab.fill("#name", "a/b")
    ada.press(["Enter"])
    ada.is_told("'a/b'")
    ada.tab.fill("#name", "Ada")
    ada.press(["Enter"])
    ada.shows(0)
    ada.is_told("")
    for done in (1, 2):
        ada.press("s")
        ada.shows(done)
    ada.tab.fill("#reason", "Yes, both have a tail")
    ada.press(["Enter", "n"])
    ada.is_told("other answer")
    ada.poll()
    ada.is_told("other answer")
    ada.tab.fill("#reason", "")
    ada.press(["Escape", "n"])
    ada.shows(3)
    ada.is_told("")

    ada.context.set_offline(True)
    ada.press("u")
    ada.is_told("cannot be reached")
    ada.context.set_offline(False)
    ada.poll()
    ada.is_told("")
    ada.tab.evaluate("document.querySelector('img.picture').onerror()")
    ada.poll()
    ada.is_told("cannot be loaded")
    ada.press("ss")
    ada.ends()
    ada.is_told("")


def test_a_tab_that_is_opened_from_another_is_not_the_same(served, browser):
    """It begins with a copy of the other's storage, as a duplicate does."""
    address, *_ = served
    ada = Tab(browser.new_context())
    ada.enter(address, "Ada")
    with ada.context.expect_page() as opened:
        ada.tab.evaluate("void open('/')")
    notice = opened.value.locator("#notice")
    playwright.expect(notice).to_contain_text("“Ada” is open in another tab")
