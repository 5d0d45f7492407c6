from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from tests.service.browser import Tags, needs_chromium, shown
from triaccel_ray.service.report.report import REPORT, Section, write_page

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
    assert tags.texts[-len(texts) - 1 : -1] == texts  # the last one is the script
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
    section = Section(
        title=evil, text=evil, header=(evil,), rows=[(evil,)], command=evil, notice=evil, about=[(evil, evil)]
    )
    tags = Tags(page_of(tmp_path, section, title=evil))
    assert tags.count("script") == 1
    assert tags.texts.count(evil) == 10


def test_empty_parts_are_left_out(tmp_path: Path) -> None:
    tags = Tags(page_of(tmp_path, Section(title="nothing", header=("a",))))
    assert tags.count("h2") == 1
    assert [tags.count(name) for name in ("p", "table", "pre", "img")] == [0] * 4


def test_a_page_is_replaced(tmp_path: Path) -> None:
    page_of(tmp_path, Section(title="old"))
    assert "old" not in page_of(tmp_path, Section(title="new"))


@needs_chromium
def test_a_click_on_a_heading_sorts_the_table(tmp_path: Path) -> None:
    rows = [("amp", "1,200", "98.5 ± 1"), ("fp32", "90", ""), ("triaccel", "<0.5", "97.2 *"), ("mine", "", "99")]
    section = Section(title="Result", header=("method", "score", "accuracy"), rows=rows)
    page = page_of(tmp_path, section)

    def first_cells(*headings: int) -> list[str]:
        """What a browser shows after clicks; the page itself would not run the script that clicks."""
        clicks = "".join(f"document.querySelectorAll('th')[{heading}].click();" for heading in headings)
        open_page = re.sub("<meta http-equiv[^>]*>", "", page).replace("</html>", f"<script>{clicks}</script></html>")
        path = tmp_path / "clicked.html"
        path.write_text(open_page)
        return re.findall("<tr><td>(.*?)</td>", shown(f"file://{path}", tmp_path))

    assert first_cells(1) == ["amp", "fp32", "triaccel", "mine"]
    assert first_cells(1, 1) == ["triaccel", "fp32", "amp", "mine"]
    assert first_cells(2) == ["mine", "amp", "triaccel", "fp32"]
    assert first_cells(0, 0) == ["amp", "fp32", "mine", "triaccel"]


@needs_chromium
def test_a_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    clicks = "document.title = 'taken over'"
    page = page_of(tmp_path, Section(title="Result")).replace("</html>", f"<script>{clicks}</script></html>")
    (tmp_path / "evil.html").write_text(page)
    assert "<title>a run</title>" in shown(f"file://{tmp_path / 'evil.html'}", tmp_path)
    policy, script = re.search("'sha256-(.*?)'", page), re.search("<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    assert base64.b64decode(policy[1]) == hashlib.sha256(script[1].encode()).digest()
