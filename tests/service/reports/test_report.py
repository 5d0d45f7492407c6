from __future__ import annotations

import base64
from pathlib import Path

from tests.service.browser import Tags
from triaccel_ray.service.reports.report import REPORT, Section, write_page

PICTURE = b"\x89PNG\r\n\x1a\n not looked at"


def page_of(tmp_path: Path, *sections: Section, title: str = "a run") -> str:
    path = write_page(tmp_path / REPORT, title, sections)
    assert path == tmp_path / REPORT
    return path.read_text()


def test_a_page_holds_everything_in_order(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    picture.write_bytes(PICTURE)
    first = Section(title="Result", text="all is well", header=("a", "b"), rows=[("1", "2"), ("3", "4")])
    second = Section(title="Next", command="triaccel run digits", pictures=[picture])
    tags = Tags(page_of(tmp_path, first, second))
    texts = ["Result", "all is well", "a", "b", "1", "2", "3", "4", "Next", "triaccel run digits"]
    assert tags.texts[-len(texts) :] == texts
    assert [tags.count(name) for name in ("h1", "h2", "table", "tr", "td", "pre", "img")] == [1, 2, 1, 3, 4, 1, 1]


def test_a_page_can_be_sent_to_anybody(tmp_path: Path) -> None:
    picture = tmp_path / "it's.png"
    picture.write_bytes(PICTURE)
    page = page_of(tmp_path, Section(title="Pictures", pictures=[picture]))
    picture.unlink()
    ((_, image),) = [tag for tag in Tags(page).tags if tag[0] == "img"]
    source = image["src"]
    assert source is not None
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == PICTURE
    assert image["alt"] == "it's"
    assert "http:" not in page
    assert "https:" not in page


def test_texts_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    section = Section(title=evil, text=evil, header=(evil,), rows=[(evil,)], command=evil)
    tags = Tags(page_of(tmp_path, section, title=evil))
    assert tags.count("script") == 0
    assert tags.texts.count(evil) == 7


def test_empty_parts_are_left_out(tmp_path: Path) -> None:
    tags = Tags(page_of(tmp_path, Section(title="nothing", header=("a",))))
    assert tags.count("h2") == 1
    assert [tags.count(name) for name in ("p", "table", "pre", "img")] == [0] * 4


def test_a_page_is_replaced(tmp_path: Path) -> None:
    page_of(tmp_path, Section(title="old"))
    assert "old" not in page_of(tmp_path, Section(title="new"))
