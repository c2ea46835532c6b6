"""The page of a run: curves and samples read back, one file that runs nothing."""
import base64
import json
import random
from html.parser import HTMLParser

import numpy as np
import pytest

from common import report

LINES = [{"step": step, "loss": 10 / step, "grad_norm": None} for step in range(2, 41, 2)]
LINES += [
    {"step": 20, "val_loss": 1.0, "note": "x", "samples": {"samples/old.png": "a heart"}},
    {"step": 40, "val_loss": 0.5, "samples": {"samples/a.png": "a <star>", "samples/b.wav": "ou"}},
    {"step": 40, "test_loss": 0.75, "loss": 9.0},
]


class Tags(HTMLParser):
    """The start tags and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture
def page(tmp_path):
    """The page of a run with LINES and samples of plain bytes."""
    (tmp_path / "samples").mkdir()
    for name in ("old.png", "a.png", "b.wav"):
        (tmp_path / "samples" / name).write_text(f"content of {name}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "config.json").write_text('{"lr": 0.5, "text": "<b>"}')
    report.write(tmp_path)
    return Tags((tmp_path / "report.html").read_text())


def points_of(chart):
    """(N, 2) corners of the curve in an SVG."""
    line, = Tags(chart).all("polyline")
    return np.array([pair.split(",") for pair in line["points"].split()], dtype=float)


def test_curves_stand_where_their_numbers_are():
    chart = report.chart("<loss>", [(0, 1.0), (10, 3.0), (20, 2.0)])
    right = report.WIDTH
    bottom = report.HEIGHT
    assert points_of(chart).tolist() == [[right, bottom / 2], [right / 2, 0], [0, bottom]]
    assert Tags(chart).texts == ["<loss> 2 (1 to 3, step 0 to 20)"]
    constant = report.chart("constant", [(5, 2.0), (5, 2.0)])
    assert np.isfinite(points_of(constant)).all()


@pytest.mark.parametrize("count, drawn", [(600, 600), (601, 301), (5000, 556)])
def test_a_long_curve_is_drawn_by_every_nth_point_and_the_newest(count, drawn):
    chart = report.chart("loss", [(step, float(step)) for step in range(count)])
    expected = np.linspace(report.WIDTH, 0, drawn)
    np.testing.assert_allclose(points_of(chart)[:, 0], expected, atol=0.06)
    assert f"loss {count - 1:.4g} " in chart


def test_the_page_has_samples_curves_newest_metrics_and_settings_in_this_order(page):
    order = [page.texts.index(text) for text in (
        "Newest samples", "a.png a <star>", "b.wav ou",
        "Curves", "loss 0.25 (0.25 to 5, step 2 to 40)", "val_loss 0.5 (0.5 to 1, step 20 to 40)",
        "Newest metrics", "9.0", "x", "test_loss",
        "Settings", "lr", "<b>",
    )]
    assert order == sorted(order)
    assert len(page.all("svg")) == 2


def test_the_newest_samples_are_in_the_page_byte_for_byte(page):
    for tag, name in (("img", "a.png"), ("audio", "b.wav")):
        media, = page.all(tag)
        content = base64.b64decode(media["src"].partition(";base64,")[2])
        assert content.decode() == f"content of {name}"


def test_a_damaged_line_is_left_out_and_the_page_is_made(page, tmp_path):
    rng = random.Random(0)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3, 20))):
            place = rng.randrange(len(content))
            content[place : place + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 5)))
        (tmp_path / "metrics.jsonl").write_bytes(content)
        report.write(tmp_path)
        assert "Newest metrics" in Tags((tmp_path / "report.html").read_text()).texts


@pytest.mark.parametrize("line", [
    b"\xff\xfe",
    b"",
    b"[1]",
    b"[" * 100_000,
    b'{"loss": 1}',
    b'{"step": "2", "loss": 1}',
    b'{"step": true, "loss": 1}',
    b'{"step": 9e9, "loss": 1}',
    b'{"step": 1' + b"0" * 400 + b', "loss": 1}',
    b'{"step": 9, "samples": 5}',
    b'{"step": 9, "samples": ["a.png"]}',
    b'{"step": 9, "samples": null}',
    b'{"step": 9, "samples": {"": "", "gone.png": "", "a\\u0000.png": "", "\\ud800.png": ""}}',
    b'{"step": 9, "samples": {"config.json": "no picture", "' + b"a" * 5000 + b'.png": 1}}',
    b'{"step": 9, "loss": 1e999, "note": "\\ud800", "lr": NaN, "scale": 1' + b"0" * 400 + b"}",
    b'{"step": 9, "loss": -1e308, "lr": {"a": [1]}}',
])
def test_a_line_that_is_not_as_it_was_written_does_not_stop_the_page(line, page, tmp_path):
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + whole + b"\n" + line)
    report.write(tmp_path)
    after = Tags((tmp_path / "report.html").read_text())
    assert "loss 0.25 (0.25 to 5, step 2 to 40)" in after.texts
    assert len(after.all("svg")) == len(page.all("svg"))


def test_the_page_needs_no_other_file_and_runs_nothing(page, tmp_path):
    text = (tmp_path / "report.html").read_text()
    assert "http" not in text
    assert "@import" not in text
    assert not [*page.all("script"), *page.all("link"), *page.all("b")]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
