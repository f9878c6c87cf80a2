"""The alternative texts of a page's images."""

from html.parser import HTMLParser


class Alternatives(HTMLParser):
    """``texts`` of the images in ``page``."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an image's text; an image without one is an error."""
        if tag == "img":
            self.texts.append(dict(attrs)["alt"])
