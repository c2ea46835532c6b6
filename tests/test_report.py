"""The page of a run: curves drawn where the figures say, samples that read back, one small file without any other."""
import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers import run_module

from common import media, report
from common.config import UserError


class Tags(HTMLParser):
    """All start tags of a page, and that they are closed in order."""
    VOID = ("meta", "img", "line", "circle", "rect", "polyline")

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
        self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def folder_of(path, lines, **config):
    (path / "samples").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.json").write_text(json.dumps({"steps": 100, "batch_size": 8, "lr": 0.5, "text": "<b>", **config,
                                                  "versions": {"torch": "2.x", "code": "abc"}}))
    return path


def page_of(folder):
    report.Report(folder).write()
    return Tags((folder / "report.html").read_text())


LINES = [{"step": step, "loss": 10 / step, "samples_per_s": 4.0, "grad_norm": None} for step in range(2, 41, 2)]
LINES += [{"step": 40, "val_loss": 0.5, "val_loss_online": 0.625, "match@8": 0.25, "match@64": 0.75, "name": "x"},
          {"step": 40, "test_loss": 0.75, "match@8": 0.125}]


def test_curves_stand_where_their_figures_are():
    out = Tags(report.chart("loss", {"a": [(0, 1.0), (10, 3.0), (20, 2.0)], "b": [(5, 1.5)]}, resumed=[10]))
    first, second = ([tuple(map(float, pair.split(","))) for pair in line["points"].split()]
                     for line in out.all("polyline"))
    x, y = zip(*first)
    assert x[0] == report.LEFT and x[2] == report.WIDTH - report.RIGHT and x[1] == pytest.approx((x[0] + x[2]) / 2)
    assert y[1] < y[2] < y[0] and y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.11)
    assert second[0][1] == pytest.approx(y[0] + (y[1] - y[0]) / 4, abs=0.11)
    labels = {float(text): float(place) for place, text in
              re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', report.chart("a", {"a": [(0, 1.0), (20, 3.0)]}))}
    assert labels[3.0] < labels[2.0] < labels[1.0] and labels[2.0] == pytest.approx((labels[1.0] + labels[3.0]) / 2)
    dashed = [line for line in out.all("line") if line.get("class") == "resumed"]
    assert [float(line["x1"]) for line in dashed] == [pytest.approx(x[1])]


def test_a_first_value_far_above_the_others_leaves_the_frame_and_a_constant_or_lone_one_has_its_own():
    points = [(step, 1000.0 if step == 0 else 1 + step / 100) for step in range(100)]
    line = Tags(report.chart("a", {"a": points})).all("polyline")[0]["points"].split()
    heights = [float(pair.split(",")[1]) for pair in line]
    assert heights[0] < 0 and max(heights) - min(heights[1:]) > 0.8 * (report.HEIGHT - report.TOP - report.BOTTOM)
    for points in ([(5, 2.0)], [(1, 0.0), (2, 0.0)], [(0, -3.0), (9, -3.0)]):
        for pair in Tags(report.chart("a", {"a": points})).all("polyline")[0]["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= report.WIDTH and report.TOP < y < report.HEIGHT - report.BOTTOM


@pytest.mark.parametrize("low, high", [(0, 1), (-3.2, 17), (1e-7, 3e-7), (990_000, 1_010_000), (0.98, 0.981)])
def test_ticks_are_few_round_and_inside(low, high):
    found = report.ticks(low, high)
    assert 2 <= len(found) <= 11 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9 * abs(high)
    size = found[1] - found[0]
    digit = size / 10 ** np.floor(np.log10(size) + 1e-9)
    assert min(abs(digit - one) for one in (1, 2, 5, 10)) < 1e-6
    np.testing.assert_allclose(np.diff(found), size, rtol=1e-6)


def test_losses_share_a_chart_with_both_kinds_of_weights_and_numbers_of_steps_another(tmp_path):
    found = report.together([name for line in LINES[:-1] for name in line if name != "step"])
    assert found["loss"] == {"loss": "loss", "val_loss": "val_loss (EMA)", "val_loss_online": "val_loss (online)"}
    assert found["match"] == {"match@8": "@8", "match@64": "@64"} and next(iter(found)) == "loss"
    page = page_of(folder_of(tmp_path / "run", LINES))
    captions = [attrs["aria-label"] for attrs in page.all("svg")]
    assert captions[0] == "loss" and "samples_per_s (/s)" in captions and "grad_norm" not in captions
    assert "step 40 of 100" in page.text and "4 samples per second" in page.text
    made = report.Report(tmp_path / "run")
    made.read()
    assert "0.125" in page.text  # the closing test's, among the figures and in no curve
    assert "test_loss" not in made.curves and made.curves["match@8"].points() == [(40, 0.25)]
    assert "2 min 0 s left" in page.text  # 60 steps of 8 samples at 4 a second
    assert "<b>" in page.text  # as text, not as a tag
    assert not page.all("b") and "2.x" in page.text


def test_the_page_needs_no_other_file_and_runs_nothing(tmp_path):
    page = page_of(folder_of(tmp_path / "run", LINES))
    text = (tmp_path / "run/report.html").read_text()
    assert not page.all("script") and not page.all("link") and "http" not in text and "@import" not in text
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.all("meta")[1]["content"].startswith("width=device-width") and "prefers-color-scheme:dark" in text


def test_a_long_run_makes_a_small_page_of_the_same_curve(tmp_path):
    lines = [{"step": step, "loss": float(np.sin(step / 5000)), "lr": 1.0} for step in range(0, 40_000)]
    folder = folder_of(tmp_path / "run", lines)
    made = report.Report(folder)
    made.write()
    curve = np.array(made.curves["loss"].points())
    assert report.POINTS <= len(curve) < 2 * report.POINTS and (folder / "report.html").stat().st_size < 200_000
    np.testing.assert_allclose(curve[:, 1], np.sin(curve[:, 0] / 5000), atol=1e-4)
    assert set(np.diff(curve[:-1, 0])) == {64}


def test_what_is_new_is_taken_in_and_a_line_that_is_being_written_is_not(tmp_path):
    folder = folder_of(tmp_path / "run", LINES[:10])
    made = report.Report(folder)
    made.write()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in LINES[10:]) + '{"step": 99, "lo')
    made.write()
    grown = (folder / "report.html").read_text()
    whole = report.Report(folder)
    whole.write()
    assert len(made.curves["loss"].points()) == 20 and "step 40 of" in grown
    assert [line for line in grown.splitlines() if "Written" not in line] == [
        line for line in (folder / "report.html").read_text().splitlines() if "Written" not in line]


def test_resumed_steps_are_dashed_lines_and_a_finished_run_says_so(tmp_path):
    folder = folder_of(tmp_path / "run", LINES)
    (folder / "auto_resume.json").write_text(json.dumps({"resumed": [10, 20], "finished": {"step": 40}}))
    page = page_of(folder)
    charts = len(page.all("svg"))
    assert len([line for line in page.all("line") if line.get("class") == "resumed"]) == 2 * charts > 2
    assert "resumed 2 times" in page.text and "finished" in page.text and "left" not in page.text


def test_the_newest_samples_are_in_the_page_byte_for_byte_as_far_as_they_fit(tmp_path, monkeypatch):
    folder, picture = folder_of(tmp_path / "run", LINES), np.zeros((4, 4, 3), np.uint8)
    for name in ("step_00000010_0", "step_00000020_0", "step_00000020_1"):
        media.write_png(folder / f"samples/{name}.png", picture + len(list((folder / "samples").iterdir())))
    (folder / "samples/step_00000020_0.wav").write_bytes(b"RIFF" + bytes(500))
    page = page_of(folder)
    assert [one["alt"] for one in page.all("img")] == ["step_00000020_0.png", "step_00000020_1.png"]
    assert base64.b64decode(page.all("img")[1]["src"].partition(",")[2]) == (
        folder / "samples/step_00000020_1.png").read_bytes()
    assert base64.b64decode(page.all("audio")[0]["src"].partition(",")[2])[:4] == b"RIFF"
    monkeypatch.setattr(report, "EMBEDDED", 450)
    page = page_of(folder)
    assert len(page.all("img")) == 2 and not page.all("audio") and "1 more in" in page.text


def test_a_grid_with_captions_has_the_whole_width(tmp_path):
    folder = folder_of(tmp_path / "run", LINES)
    for name, width in (("0_small", 345), ("1_grid", 804)):
        media.write_png(folder / f"samples/step_00000010_{name}.png", np.zeros((4, width, 3), np.uint8))
    page = page_of(folder)
    assert [one.get("class") for one in page.all("figure")][-2:] == [None, "wide"]


def test_runs_are_compared_curve_by_curve_and_by_the_settings_that_differ(tmp_path):
    one, other = folder_of(tmp_path / "one", LINES), folder_of(tmp_path / "other", LINES[:5], lr=0.25)
    out = tmp_path / "both.html"
    assert f"wrote {out}" in run_module("common.tracker", "report", one, other, "--out", out)
    page = Tags(out.read_text())
    assert len(page.all("polyline")) == 2 + 2 + 4  # loss and speed of both, and what the first alone has
    assert f"{one}: 0.5 · {other}: 0.25" in page.text and "batch_size" not in page.text


def test_one_run_gets_its_page_anew_and_no_run_is_a_message(tmp_path):
    folder = folder_of(tmp_path / "run", LINES)
    assert f"wrote {folder}/report.html" in run_module("common.tracker", "report", folder)
    assert "error: " in (out := run_module("common.tracker", "report", tmp_path / "none", expect=1))
    assert f"{tmp_path}/none: no run, it has no metrics.jsonl" in out and "Traceback" not in out
    with pytest.raises(UserError, match="no run"):
        report.compare([tmp_path / "none"])


@pytest.mark.parametrize("seconds, words", [(5, "5 s"), (65, "1 min 5 s"), (3 * 3600 + 120, "3 h 2 min"),
                                            (2 * 86400 + 7200, "2 d 2 h")])
def test_durations_read_as_one_says_them(seconds, words):
    assert report.duration(seconds) == words
