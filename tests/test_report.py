"""The page of a run: curves drawn where the figures say, samples that read back, one file that runs nothing."""
import base64
import json
import os
from html.parser import HTMLParser

import numpy as np
import pytest

from common import media, report

LINES = [{"step": step, "loss": 10 / step, "samples_per_s": 4.0, "grad_norm": None} for step in range(2, 41, 2)]
LINES += [{"step": step, "val_loss": 20 / step, "name": "x"} for step in (20, 40)]
LINES += [{"step": 40, "once": 0.5, "samples": {"samples/a.png": "a star"}},
          {"step": 40, "test_loss": 0.75, "loss": 9.0}]


class Tags(HTMLParser):
    """All start tags of a page with the text before each, and that they are closed in order."""
    VOID = ("meta", "img", "polyline")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def page_of(path, lines=LINES, finished=None, **config):
    """The page of a run in the folder `path` with these lines."""
    (path / "samples").mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.json").write_text(json.dumps({"steps": 1100, "lr": 0.5, "text": "<b>", **config}))
    (path / "auto_resume.json").write_text(json.dumps({"checkpoints": [], "finished": finished}))
    report.write(path)
    return Tags((path / "report.html").read_text())


def points_of(text):
    """[[x, y], ...] of the one curve in an SVG."""
    line, = Tags(text).all("polyline")
    return np.array([[float(value) for value in pair.split(",")] for pair in line["points"].split()])


def test_curves_stand_where_their_figures_are():
    drawn = points_of(report.chart("loss", [(0, 1.0), (10, 3.0), (20, 2.0)]))
    drawn = drawn[np.argsort(drawn[:, 0])]
    (left, low), (middle, high), (right, between) = drawn
    assert left == report.MARGIN and right == report.WIDTH - 8 and middle == pytest.approx((left + right) / 2)
    assert high == 8 and low == report.HEIGHT - 24 and between == pytest.approx((low + high) / 2)
    text = Tags(report.chart("<loss>", [(0, 1.0), (10_000, 3.0)])).text.split("\n")
    assert [word for word in text if word] == ["<loss> 3", "3", "1", "step 0", "10,000"]
    page = Tags(report.chart("loss", [(0, 1.0), (10_000, 3.0)]))
    places = [(int(text["x"]), int(text["y"])) for text in page.all("text")]
    assert places[:2] == [(0, high + 8), (0, low)] and places[2][0] == left and places[2][1] > low  # what they name
    width, height = map(int, page.all("svg")[0]["viewbox"].split()[2:])
    assert all(0 <= x < width - 50 and 8 <= y < height for x, y in places) and right < width and low < height
    assert f"svg{{width:{width}px}}" in report.STYLE
    assert np.isfinite(points_of(report.chart("constant", [(5, 2.0), (5, 2.0)]))).all()


@pytest.mark.parametrize("count", [600, 601, 5000])
def test_a_long_curve_is_drawn_by_every_nth_point_and_the_newest(count):
    drawn = points_of(report.chart("loss", [(step, float(step)) for step in range(count)]))
    assert 300 <= len(drawn) <= 600 and max(drawn[:, 0]) == report.WIDTH - 8
    steps = np.diff(np.sort(drawn[:, 0]))
    np.testing.assert_allclose(steps, steps.mean(), atol=0.11)
    assert len(drawn) == 600 if count == 600 else len(drawn) < 600


def test_a_page_has_samples_curves_of_two_points_newest_figures_and_settings_in_this_order(tmp_path):
    page = page_of(tmp_path / "run")
    heads = [page.text.index(word) for word in ("Newest samples", "Curves", "Newest figures", "Settings")]
    assert heads == sorted(heads) and f"{tmp_path}/run" in page.text
    captions = [line for line in page.text[heads[1]:heads[2]].split("\n") if line[:1].isalpha() and line[:4] != "step"]
    assert captions == ["Curves", "loss 0.25", "samples_per_s 4", "val_loss 0.5"]  # and none of the closing test's
    figures = page.text[heads[2]:heads[3]].split()
    assert figures[figures.index("loss") + 1] == "9.0" and figures[figures.index("once") + 1] == "0.5"
    assert "0.75" in figures and "samples" not in figures and "None" in figures
    assert "step 40 of 1,100\n" in page.text and "finished" not in page.text
    assert "<b>" in page.text and not page.all("b") and "lr\n0.5" in page.text
    assert "step 40 of 1,100, finished" in page_of(tmp_path / "run", finished={"step": 40}).text


def test_the_page_needs_no_other_file_and_runs_nothing(tmp_path):
    page = page_of(tmp_path / "run")
    text = (tmp_path / "run/report.html").read_text()
    assert not page.all("script") and not page.all("link") and "http" not in text and "@import" not in text
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_the_newest_samples_are_in_the_page_byte_for_byte_as_far_as_they_fit(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    for number, name in enumerate(("step_00000020_0", "step_00000020_1", "step_00000010_0")):
        media.write_png(path := folder / f"samples/{name}.png", np.full((4, 4, 3), number, np.uint8))
        os.utime(path, (100 - number, 100 - number))
    (folder / "samples/step_00000020_2.wav").write_bytes(b"RIFF" + bytes(500))
    page = page_of(folder)
    assert [image["alt"] for image in page.all("img")] == ["step_00000020_0.png", "step_00000020_1.png"]
    assert base64.b64decode(page.all("img")[1]["src"].partition("data:image/png;base64,")[2]) == (
        folder / "samples/step_00000020_1.png").read_bytes()
    assert base64.b64decode(page.all("audio")[0]["src"].partition("data:audio/wav;base64,")[2]) == b"RIFF" + bytes(500)
    assert "step_00000020_2.wav" in page.text and "too large" not in page.text
    media.write_png(folder / "samples/test_0.png", np.zeros((4, 4, 3), np.uint8))
    assert [image["alt"] for image in page_of(folder).all("img")] == ["test_0.png"]
    (folder / "samples/test_0.png").unlink()
    size = sum(path.stat().st_size for path in folder.glob("samples/step_00000020_*.png"))
    for room, sounds in ((size + 503, 0), (size + 504, 1)):
        monkeypatch.setattr(report, "EMBEDDED", room)
        page = page_of(folder)
        assert len(page.all("img")) == 2 and len(page.all("audio")) == sounds
        assert ("too large" in page.text) == (not sounds)
