"""metrics.jsonl: what is logged can be read back, and a resumed run leaves no line twice."""
import json

import pytest

from common import tracker


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_logged_reads_back_and_what_is_not_finite_is_null(tmp_path):
    log = tracker.Tracker(tmp_path, 0)
    log.log(1, loss=0.1 + 0.2, samples_seen=64, name="größe", rows=["a", 1])
    log.log(2, loss=float("nan"), best=float("inf"), low=float("-inf"), zero=0.0)
    log.sync()
    assert lines(tmp_path) == [{"step": 1, "loss": 0.1 + 0.2, "samples_seen": 64, "name": "größe", "rows": ["a", 1]},
                               {"step": 2, "loss": None, "best": None, "low": None, "zero": 0.0}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_on_resume_lines_beyond_the_step_and_torn_ones_are_dropped_and_come_again_once(tmp_path):
    whole = tracker.Tracker(tmp_path, 0)
    for step in range(1, 11):
        whole.log(step, loss=1 / step)
        if step % 5 == 0:
            whole.log(step, val_loss=2 / step)
    expected = (tmp_path / "metrics.jsonl").read_bytes()
    for torn in (b"", b'{"step": 3, "lo', b'{"step": 3}', b"\xff\xfe\n", b"[1, 2]\n", b'"step"\n', b"{}\n"):
        (tmp_path / "metrics.jsonl").write_bytes(expected + torn)
        resumed = tracker.Tracker(tmp_path, 5)
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 5]
        for step in range(6, 11):
            resumed.log(step, loss=1 / step)
        resumed.log(10, val_loss=2 / 10)
        assert (tmp_path / "metrics.jsonl").read_bytes() == expected


def test_a_rank_that_does_not_log_writes_and_prints_nothing(tmp_path, capsys):
    log = tracker.Tracker(tmp_path / "not there", 0, enabled=False)
    log.log(1, loss=1.0)
    log.say("hello")
    log.sync()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")
    tracker.Tracker(tmp_path, 0).say("hello")
    assert "hello" in "".join(capsys.readouterr())


@pytest.mark.parametrize("value, shown",
                         [(0.123456, "a 0.1235"), (1e-7, "a 1e-07"), (12345678, "a 12345678"), ("x", "a x")])
def test_figures_are_shown_at_a_readable_precision(value, shown):
    assert tracker.show({"a": value, "b": 1}) == f"{shown}  b 1"


def test_the_table_puts_figures_of_several_sampling_steps_on_one_line():
    lines = tracker.table({"step": 3, "match@8": 0.5, "match@64": 0.25, "loss": 0.125})
    assert [" ".join(line.split()) for line in lines] == ["step 3", "match 0.5000 @8 0.2500 @64", "loss 0.1250"]


def test_the_closing_test_is_logged_once_however_often_the_end_is_reached(tmp_path):
    for _ in range(3):
        log = tracker.Tracker(tmp_path, 8, at_end=True)
        log.log(8, test_loss=0.5)
    tracker.Tracker(tmp_path, 8)  # a run that is given more steps keeps it
    assert (tmp_path / "metrics.jsonl").read_text().count("test_loss") == 1
