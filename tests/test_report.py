"""report.html: its curves and samples are read back; it is a single file without scripts."""
import base64
import html
import re

import numpy as np
import pytest

from common import checkpoint
from common.interop import report

LINES = [{"step": step, "loss": 10 / step, "grad_norm": None} for step in range(2, 41, 2)]
LINES += [
    {"step": 20, "val_loss": 1.0, "note": "a line", "samples": {"samples/old.png": "a heart"}},
    {"step": 40, "val_loss": 0.5, "samples": {
        "samples/a.png": "a <star> \ud800", "samples/b.wav": "ou"}},
    {"step": 40, "test_loss": 0.75, "loss": 9.0},
]


@pytest.fixture
def page(tmp_path):
    """The report of a run that logged LINES, with plain text in its sample files."""
    (tmp_path / "samples").mkdir()
    for name in ("old.png", "a.png", "b.wav"):
        (tmp_path / "samples" / name).write_text(f"content of {name}")
    checkpoint.write_json({"lr": 0.5, "text": "<b>"}, tmp_path / "config.json")
    report.write(tmp_path, LINES)
    return (tmp_path / "report.html").read_text()


def points_of(chart):
    """(N, 2) corners of the curve in an SVG."""
    points, = re.findall('points="(.*?)"', chart)
    return np.array([pair.split(",") for pair in points.split()], dtype=float)


def test_a_curve_has_its_numbers_with_y_upwards_in_a_box_of_their_range():
    chart = report.chart("<loss>", [(0, 1.0), (10, 3.0), (20, 2.0)])
    assert points_of(chart).tolist() == [[20, -2], [10, -3], [0, -1]]
    assert "&lt;loss&gt; 2 (1 to 3, step 0 to 20)" in chart


def test_a_long_curve_is_drawn_by_every_nth_point_and_the_newest():
    chart = report.chart("loss", [(step, 2.0) for step in range(5000)])
    assert points_of(chart)[:, 0].tolist() == list(range(4999, 0, -9))


def test_the_page_has_samples_curves_newest_metrics_and_settings_in_this_order(page):
    order = [page.index(html.escape(text)) for text in (
        "Newest samples", "a.png a <star> \\ud800", "b.wav ou",
        "Curves", "loss 0.25 (0.25 to 5, step 2 to 40)", "val_loss 0.5 (0.5 to 1, step 20 to 40)",
        "Newest metrics", "9.0", "a line", "test_loss",
        "Settings", "lr", "<b>",
    )]
    assert order == sorted(order)
    assert page.count("<svg") == 2


def test_the_newest_samples_are_in_the_page_byte_for_byte(page):
    contents = [base64.b64decode(source) for source in re.findall('base64,(.*?)"', page)]
    assert contents == [b"content of a.png", b"content of b.wav"]


def test_the_page_needs_no_other_file_and_runs_nothing(page):
    assert not re.search("http|@import|<script|<link|<b>| on[a-z]+=", page)


def test_a_run_without_samples_has_no_heading_for_them(tmp_path):
    checkpoint.write_json({}, tmp_path / "config.json")
    report.write(tmp_path, [{"step": 1, "loss": 1.0}])
    assert re.findall("<h2>(.*?)</h2>", (tmp_path / "report.html").read_text()) == [
        "Curves", "Newest metrics", "Settings",
    ]
