"""A page made of a hostile host's words is a page of words: nothing in it runs, loads or leads anywhere."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from orchestrator.core.answers import check_record
from orchestrator.core.errors import ProtocolError
from tests.security.evil_host import NAME
from tests.support.laptop import Laptop

RUNS = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "video", "audio", "foreignobject"}


class Finder(HTMLParser):
    """Collects what could do something."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in RUNS:
            self.bad.append(tag)
        for name, value in attrs:
            loads = name in {"src", "href", "xlink:href", "action", "data"} and not str(value).startswith("#")
            if name.startswith("on") or loads or "url(" in str(value):
                self.bad.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_report_of_a_hostile_host_runs_nothing(evil: Laptop) -> None:
    evil.environment["ORCH_EVIL_OVER"] = "1"
    evil.run("report", NAME, "-o", "page.html", expect=0)
    text = (evil.folder / "page.html").read_text()
    found = Finder()
    found.feed(text)
    assert found.bad == []
    assert "alert(1)" in found.words, "the words are there, as words"
    assert "@import" not in text
    assert not {char for char in text if not char.isprintable() and char not in "\n\t"}


@pytest.mark.parametrize("job", ["../escaped", "a/b", "a\\b", ".hidden", "", "a\nb", "x" * 300])
def test_an_id_that_is_no_file_name_is_no_job(job: str) -> None:
    """`orch report` names its page by the id."""
    with pytest.raises(ProtocolError, match="no job id"):
        check_record(job, {})
