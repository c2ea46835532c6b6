"""`report.html` in a run folder: a page to look at, one file that needs no other and runs no script."""
import base64
import html
import json
import re
from pathlib import Path

from common import checkpoint, config

POINTS, EMBEDDED = 600, 3_000_000  # of a curve, and bytes of pictures and sounds in a page, at most
WIDTH, HEIGHT, MARGIN = 400, 200, 66  # of a chart; the labels of its axes stand in the margin
STYLE = """body{font:15px system-ui,sans-serif;max-width:1300px;margin:16px auto;padding:0 16px}
div{display:flex;flex-wrap:wrap;gap:14px}figure{margin:0;max-width:100%;overflow-x:auto}img{image-rendering:pixelated}
svg{width:400px}text{font-size:12px}td{padding:1px 14px 1px 0;vertical-align:top}"""


def write(folder):
    """Write report.html into a run folder: newest samples, curves, newest figures, settings."""
    folder, curves, newest = Path(folder), {}, {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        newest |= metrics
        for name, value in metrics.items():
            # the closing test is of other samples than the curves
            if isinstance(value, (int, float)) and name != "step" and "test_loss" not in metrics:
                curves.setdefault(name, []).append((metrics["step"], value))
    record, settings = checkpoint.record_of(folder), config.read_json(folder / "config.json")
    words = f"step {newest.get('step', 0):,} of {settings['steps']:,}" + ", finished" * bool(record["finished"])
    newest.pop("samples", None)
    charts = "".join(chart(name, points) for name, points in curves.items() if len(points) > 1)
    text = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(str(folder))}</title>'
            f"<style>{STYLE}</style></head><body><h1>{html.escape(str(folder))}</h1><p>{words}</p>{samples(folder)}"
            f"<h2>Curves</h2><div>{charts}</div><h2>Newest figures</h2>{table(newest)}<h2>Settings</h2>"
            f"{table(settings)}</body></html>")
    with checkpoint.replacing(folder / "report.html", durably=False) as file:  # it can be made again
        file.write(text.encode())


def samples(folder):
    """The pictures and sounds of the newest step that has some, up to EMBEDDED bytes."""
    found = sorted((folder / "samples").glob("*.*"), key=lambda path: (path.stat().st_mtime, path.name))
    steps = [re.match(r"step_\d+|[^_]*", path.stem)[0] for path in found]
    figures, room = "", EMBEDDED
    for path in sorted(path for path, step in zip(found, steps) if step == steps[-1]):
        room -= path.stat().st_size
        data = base64.b64encode(path.read_bytes()).decode() if room >= 0 else ""
        media = {".png": f'<img alt="{html.escape(path.name)}" src="data:image/png;base64,{data}">',
                 ".wav": f'<audio controls src="data:audio/wav;base64,{data}"></audio>'}.get(path.suffix, "")
        figures += f"<figure><figcaption>{html.escape(path.name)}</figcaption>{media if data else 'too large'}</figure>"
    return f"<h2>Newest samples</h2><div>{figures}</div>"


def chart(name, points):
    """An SVG of the curve [(step, value), ...]. It draws every n-th point, POINTS at most."""
    points = points[::-(-len(points) // POINTS)]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points))

    def at(step, value):
        x = MARGIN + (step - left) / (right - left or 1) * (WIDTH - MARGIN - 8)
        return f"{x:.1f},{8 + (high - value) / (high - low or 1) * (HEIGHT - 32):.1f}"
    line = " ".join(at(*point) for point in points)
    labels = [(0, 16, f"{high:.4g}"), (0, HEIGHT - 24, f"{low:.4g}"), (MARGIN, HEIGHT - 6, f"step {left:,}"),
              (WIDTH - 2 * MARGIN, HEIGHT - 6, f"{right:,}")]
    ink = "".join(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in labels)
    return (f'<figure><figcaption>{html.escape(name)} {points[-1][1]:.4g}</figcaption><svg viewBox="0 0 {WIDTH} '
            f'{HEIGHT}"><polyline fill="none" stroke="#2563eb" points="{line}"/>{ink}</svg></figure>')


def table(values):
    """{name: value} as rows."""
    rows = "".join(f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
                   for name, value in values.items())
    return f"<table>{rows}</table>"
