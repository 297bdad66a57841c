"""A page holds everything it shows, and whatever it is given stays text. How it looks and runs is tests/browser's."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from compiled_adv import page
from compiled_adv.errors import ExtraMissing

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \" ' & %{x} @blue \u202e\ud800\x00" + "y" * 99


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.scripts, self.text, self.inside = [], [], "", None
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def made(text="", figure=None):
    behind = page.table([text or "x"], [[text, 1.5], [None, 2]], [{"key": text}, {}])
    blocks = [
        page.tiles([page.Tile(text, text, text, "warn")]),
        page.paragraph(text),
        page.chart(text or "c", figure or {"data": [{"name": page.label(text)}], "layout": {}}, behind, note=text),
        page.folded(text, page.columns(behind, behind)),
    ]
    sections = [page.Section(text, blocks, text)]
    common = {"lead": text, "headline": text, "facts": [(text, text)], "footer": [page.bullets([text])]}
    return page.page(text or "t", sections, filters={text: [text, "b"]}, **common)


def test_hostile_text_makes_no_element_and_no_attribute():
    plain, hostile = Elements(made("plain")), Elements(made(HOSTILE))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert [set(attrs) for _, attrs in hostile.tags] == [set(attrs) for _, attrs in plain.tags]
    assert "<img src=x onerror=alert(1)>" in hostile.text


def test_what_cannot_be_seen_is_shown_by_its_number():
    assert page.visible("a\u202eb\ud800c\x00d\te") == "a\\u202eb\\ud800c\\u0000d\te"
    page.page("t", [page.Section(HOSTILE, [])]).encode()  # halves of surrogate pairs would not encode


def test_long_text_is_cut():
    assert len(page.visible("x" * 10_000, 50)) == 50


@pytest.mark.parametrize("text", ["<b>bold</b>", "%{x}", "@blue", '<a href="https://example.org">x</a>'])
def test_a_label_is_no_tag_no_template_and_no_colour_of_plotly(text):
    assert not set("<>%@") & set(page.label(text))


def test_a_figure_survives_the_page_and_numbers_that_are_not_finite_are_gaps():
    figure = {"data": [{"y": [1.0, float("nan"), float("inf")], "name": "</script><!--&"}], "layout": {}}
    (drawn,) = [s for s in Elements(made(figure=figure)).scripts if s.startswith('{"data"')]
    assert json.loads(drawn) == {"data": [{"y": [1.0, None, None], "name": "</script><!--&"}], "layout": {}}


def test_every_script_that_runs_is_allowed_by_its_hash_and_nothing_else_is():
    elements = Elements(made())
    (policy,) = [a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"]
    runs = [
        text
        for (_, attrs), text in zip([t for t in elements.tags if t[0] == "script"], elements.scripts, strict=True)
        if attrs.get("type") != "application/json"
    ]
    hashes = {f"sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}" for s in runs}
    assert {*re.findall(r"'(sha256-[^']+)'", policy)} == hashes
    assert "default-src 'none'" in policy and not re.search(r"script-src[^;]*unsafe|https?:", policy)


def test_no_element_fetches_anything():
    fetching = [(tag, a) for tag, a in Elements(made()).tags if {"src", "srcset", "data", "action"} & {*a}]
    assert not fetching
    assert all(a["href"].startswith(("#", "data:")) for _, a in Elements(made()).tags if "href" in a)


def test_every_colour_has_a_light_and_a_dark_form():
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for both in page.COLOURS.values() for colour in both)
    assert all(name.removeprefix("@") in page.COLOURS for name in page.SERIES)


def test_without_plotly_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ExtraMissing, match=r"compiled-adv\[report\]"):
        page.page("t", [])
