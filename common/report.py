"""A page to look at: `report.html` in a run folder, one file that needs no other, and one that compares runs.

    python -m common.tracker report RUN [RUN ...] [--out FILE]
"""
import base64
import html
import json
import math
import re
import time
import zlib
from pathlib import Path

from common import checkpoint
from common.config import UserError, read_json

POINTS = 600  # of a curve, at most; longer ones are thinned
EMBEDDED = 3_000_000  # bytes of the pictures and sounds in a page
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 250, 56, 12, 12, 38  # of a chart and its margins
COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b", "#0891b2", "#a16207")
STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2430;--faint:#667085;--line:#e3e7ee;--card:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--ink:#e6e9ee;--faint:#98a2b3;--line:#2b323d;--card:#191f27}
.series{filter:brightness(1.35)}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1320px;padding:16px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:28px 0 10px}p{margin:0 0 8px;color:var(--faint)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:14px}
figure{margin:0;padding:10px;background:var(--card);border:1px solid var(--line);border-radius:8px;min-width:0}
figcaption{font-weight:600;margin-bottom:4px;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto}svg text{fill:var(--faint);font:12px system-ui,sans-serif}
.rule{stroke:var(--line)}.resumed{stroke:var(--faint);stroke-dasharray:3 3}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--faint)}
.legend i{display:inline-block;width:14px;height:3px;margin:0 5px 3px 0;vertical-align:middle}
.samples img{width:100%;height:auto;border-radius:4px;image-rendering:pixelated}audio{width:100%}
.samples .wide{grid-column:1/-1;overflow-x:auto}.samples .wide img{width:auto}
.bar{height:6px;background:var(--line);border-radius:3px;margin:8px 0}
.bar div{height:6px;background:#2563eb;border-radius:3px}
table{border-collapse:collapse;font-size:13px}td{padding:2px 14px 2px 0;vertical-align:top;overflow-wrap:anywhere}
td+td{font-variant-numeric:tabular-nums}summary{cursor:pointer;font-weight:600}
"""


class Curve:
    """A metric over the steps, of fewer than 2 * POINTS points: in a long run each is the mean of several."""

    def __init__(self):
        self.whole, self.rest, self.stride = [], [], 1

    def add(self, step, value):
        self.rest.append((step, value))
        if len(self.rest) == self.stride:
            self.whole.append(mean(self.rest))
            self.rest = []
        if len(self.whole) == 2 * POINTS:
            self.whole, self.stride = [mean(pair) for pair in zip(self.whole[::2], self.whole[1::2])], 2 * self.stride

    def points(self):
        """[(step, value), ...], of which the last may stand for fewer lines than the others."""
        return self.whole + ([mean(self.rest)] if self.rest else [])


def mean(points):
    """The point amid some."""
    return tuple(sum(part) / len(points) for part in zip(*points))


class Report:
    """What a page says of a run. `write` takes in what is new in metrics.jsonl, so that it stays fast in a long run."""

    def __init__(self, folder):
        self.folder, self.offset, self.curves, self.last = Path(folder), 0, {}, {}

    def read(self):
        """Take in the lines of metrics.jsonl since the last time, and what auto_resume.json and config.json say."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"{self.folder}: no run, it has no metrics.jsonl")
        with open(path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written right now
                    break
                self.offset += len(line)
                self._take(json.loads(line))
        self.config, self.record = ({}, {})
        if (self.folder / "config.json").is_file():
            self.config = read_json(self.folder / "config.json")
        if (self.folder / "auto_resume.json").is_file():
            self.record = read_json(self.folder / "auto_resume.json")

    def _take(self, line):
        step, tested = line.pop("step"), "test_loss" in line  # the closing test is of other samples than the curves
        for name, value in line.items():
            if isinstance(value, (int, float)):
                self.last[name] = value
                if not tested:
                    self.curves.setdefault(name, Curve()).add(step, value)
        self.last["step"] = step

    def drawn(self):
        """Names of the metrics that are worth a chart: not the count of samples, and no counts of what never was."""
        return [name for name, curve in self.curves.items() if name != "samples_seen" and (
            name not in ("overflows", "unusable_rows") or any(value for _, value in curve.points()))]

    def write(self):
        """Write report.html into the run folder."""
        with checkpoint.replacing(self.folder / "report.html", durably=False) as file:  # it can be made again
            file.write(self.page().encode())

    def page(self):
        """The page as it is now."""
        self.read()
        return page(str(self.folder), self._body())

    def _body(self):
        charts = [chart(title, {label: self.curves[name].points() for name, label in names.items()},
                        self.record.get("resumed", ())) for title, names in together(self.drawn()).items()]
        settings = {name: value for name, value in self.config.items() if name != "versions"}
        parts = [self._state(), f'<h2>Curves</h2><div class="grid">{"".join(charts)}</div>', samples(self.folder),
                 f"<h2>Newest figures</h2>{table(self.last)}",
                 f"<h2>Settings</h2><details><summary>config.json</summary>{table(settings)}</details>",
                 f"<p>Made by {table(self.config.get('versions', {}))}</p>"]
        return "".join(parts)

    def _state(self):
        """Where the run is, how fast, and how long it will still take."""
        step, steps = self.last.get("step", 0), self.config.get("steps", 0)
        words = [f"step {step:,} of {steps:,}" if steps else f"step {step:,}"]
        rate = self.last.get("samples_per_s")
        if rate:
            words.append(f"{rate:,.3g} samples per second")
        if self.record.get("finished"):
            words.append("finished")
        elif rate and steps:
            left = duration((steps - step) * self.config.get("batch_size", 1) / rate)
            words.append(f"{left} left, evaluations aside")
        if resumed := self.record.get("resumed"):
            words.append(f"resumed {len(resumed)} time{'s' if len(resumed) > 1 else ''}, where the dashed lines are")
        share = 100 * step / steps if steps else 0
        return f'<p>{" · ".join(words)}</p><div class="bar"><div style="width:{min(100, share):.1f}%"></div></div>'


def together(names):
    """{title: {name: label}} of the charts in which metrics are drawn: losses in one, and all T of a name@T."""
    charts = {}
    for name in names:
        base, at, steps = name.partition("@")
        title = "loss" if base.endswith("loss") or base in ("loss", "val_loss_online") else base
        label = {"val_loss": "val_loss (EMA)", "val_loss_online": "val_loss (online)"}.get(name, f"@{steps}" if at else
                                                                                          name)
        charts.setdefault(title, {})[name] = label
    return dict(sorted(charts.items(), key=lambda item: item[0] != "loss"))


def unit(name):
    """The unit of a metric, by its name."""
    if "_db" in name:
        return "dB"
    return "/s" if name.endswith("_per_s") else "s" if name.endswith("_s") else ""


def ticks(low, high, count=5):
    """About `count` round numbers from low to high."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    size = power * next(one for one in (1, 2, 5, 10) if one * power >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def short(value):
    """A number as a label: 12k, 3M, 0.02."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def chart(title, series, resumed=()):
    """An SVG of curves {label: [(step, value), ...]} with axes; dashed lines where a run was `resumed`."""
    points = [point for curve in series.values() for point in curve]
    left, right = 0, max(step for step, _ in points) or 1
    # of many, the first steps' values, often far above the others, may leave the frame
    settled = [value for step, value in points if len(points) < 20 or step >= left + 0.05 * (right - left)]
    low, high = min(settled), max(settled)
    if high - low < 1e-9 * max(1, abs(high)):
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def at(step, value):
        x = LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{min(max(y, -HEIGHT), 2 * HEIGHT):.1f}"
    ink, key = [], f"c{zlib.crc32(repr((title, *series)).encode())}"
    for value in ticks(low, high):
        y = at(left, value).split(",")[1]
        ink.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
                   f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(left, right, 4):
        x = at(value, low).split(",")[0]
        ink.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(value)}</text>')
    ink.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">step</text>')
    for step in resumed:
        x = at(step, low).split(",")[0]
        ink.append(f'<line class="resumed" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    names = []
    for number, (label, curve) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        line = " ".join(at(*point) for point in curve)
        mark = "" if len(curve) > 60 else f' marker-start="url(#{key}m{number})" marker-mid="url(#{key}m{number})"' \
                                          f' marker-end="url(#{key}m{number})"'
        ink.append(f'<marker id="{key}m{number}" viewBox="0 0 4 4" refX="2" refY="2" markerWidth="4" markerHeight="4">'
                   f'<circle cx="2" cy="2" r="2" fill="{color}"/></marker>' if mark else "")
        ink.append(f'<polyline class="series" clip-path="url(#{key})" fill="none" stroke="{color}" stroke-width="1.6" '
                   f'stroke-linejoin="round" points="{line}"{mark}/>')
        names.append(f'<span><i class="series" style="background:{color}"></i>{html.escape(label)} '
                     f"{short(curve[-1][1])}</span>")
    words = f"{title} ({unit(title)})" if unit(title) else title
    return (f'<figure><figcaption>{html.escape(words)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{html.escape(words)}"><clipPath id="{key}"><rect x="{LEFT}" y="{TOP - 4}" '
            f'width="{WIDTH - LEFT - RIGHT + 4}" height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>{"".join(ink)}</svg>'
            f'<div class="legend">{"".join(names)}</div></figure>')


def samples(folder):
    """The newest pictures and sounds of a run, as far as they fit into the page."""
    found = [path for path in (folder / "samples").glob("*") if path.suffix in (".png", ".wav")]
    if not found:
        return ""

    def batch(path):
        return re.match(r"step_\d+|[^_]*", path.stem)[0]
    newest = batch(max(found, key=lambda path: (path.stat().st_mtime, path.name)))
    shown, wide, room, left_out = {}, set(), EMBEDDED, 0
    for path in sorted(path for path in found if batch(path) == newest):
        if path.stat().st_size > room:
            left_out += 1
            continue
        room -= path.stat().st_size
        content = path.read_bytes()
        data = base64.b64encode(content).decode()
        if path.suffix == ".png" and int.from_bytes(content[16:20], "big") > WIDTH:
            wide.add(path.stem)  # a grid with captions: at its own size, over the whole width
        shown.setdefault(path.stem, []).append(
            f'<img alt="{html.escape(path.name)}" src="data:image/png;base64,{data}">' if path.suffix == ".png" else
            f'<audio controls preload="none" src="data:audio/wav;base64,{data}"></audio>')
    figures = "".join(f"<figure{' class=wide' * (name in wide)}><figcaption>{html.escape(name)}</figcaption>"
                      f"{''.join(parts)}</figure>" for name, parts in shown.items())
    note = f"<p>{left_out} more in {html.escape(str(folder / 'samples'))}</p>" if left_out else ""
    return f'<h2>Newest samples</h2><div class="grid samples">{figures}</div>{note}'


def table(values):
    """{name: value} as rows."""
    rows = (f"<tr><td>{html.escape(str(name))}</td><td>"
            f"{html.escape(f'{value:.6g}' if isinstance(value, float) else str(value))}</td></tr>"
            for name, value in values.items())
    return f"<table>{''.join(rows)}</table>"


def duration(seconds):
    """1 d 2 h, 3 h 20 min, 5 min, 12 s."""
    for size, word, smaller, other in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {word} {int(seconds % size // smaller)} {other}"
    return f"{int(seconds)} s"


def page(title, body):
    """A whole page."""
    made = time.strftime("%Y-%m-%d %H:%M")
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
            f"<h1>{html.escape(title)}</h1>{body}<p>Written {made}.</p></body></html>")


def compare(folders):
    """A page with a chart for each metric, in which each run is a curve."""
    runs = {}
    for folder in folders:
        runs[str(folder)] = run = Report(folder)
        run.read()
    names = dict.fromkeys(name for run in runs.values() for names in together(run.drawn()).values() for name in names)
    charts = [chart(name, {label: run.curves[name].points() for label, run in runs.items() if name in run.curves})
              for name in names]
    differing = {name: " · ".join(f"{label}: {run.config.get(name)}" for label, run in runs.items())
                 for name in dict.fromkeys(name for run in runs.values() for name in run.config)
                 if name != "versions" and len({str(run.config.get(name)) for run in runs.values()}) > 1}
    body = f'<div class="grid">{"".join(charts)}</div><h2>Settings that differ</h2>{table(differing)}'
    return page("Runs compared", body)
