"""Small web pages on which a person answers: ranking (``paco-reward rank``) and votes (rewards).

A page is one HTML file and an object with the four methods of ``Page``. ``page_app`` makes an
application of them, and ``PageServer`` serves it from a thread of this process:

    class Votes:
        html = Path(__file__).with_name("votes.html")

        def state(self, query): ...  # GET /state?name=…: what the page shows
        def answer(self, body): ...  # POST /answer: keep an answer, return the new state
        def undo(self, body): ...  # POST /undo: take one back, return the new state
        def picture(self, name): ...  # GET /picture/NAME: a file, encoded bytes or None

    with PageServer(lambda key: page_app(Votes(), key), port=7870) as server:
        print(server.announcement())
        server.wait()

The HTML file loads ``/page.css`` and ``/page.js``, which have what pages share: calls that show
errors, polling, keys of the keyboard, and a picture's full size. It needs the extra
``paco-judge[pages]``.
"""

from paco_judge.pages.app import Page, page_app, person_name
from paco_judge.pages.keys import KeyGuard, PageGuard
from paco_judge.pages.server import PageServer

__all__ = ["KeyGuard", "Page", "PageGuard", "PageServer", "page_app", "person_name"]
