"""Write `report.html` to a run folder: a single page without external files or scripts."""

import base64
import collections
import html
import math

from common import checkpoint, config

POINTS = 600  # maximum points per curve
STYLE = """body{font:15px system-ui,sans-serif;max-width:1300px;margin:16px auto;padding:0 16px}
div{display:flex;flex-wrap:wrap;gap:14px}figure{margin:0;max-width:100%}
img{image-rendering:pixelated}td{padding:1px 14px 1px 0;vertical-align:top}"""
MEDIA = {
    ".png": '<img alt="" src="data:image/png;base64,{}">',
    ".wav": '<audio controls src="data:audio/wav;base64,{}"></audio>',
}


def write(folder, lines):
    """Write report.html to a run folder: newest samples, curves, newest metrics, settings.

    folder: a Path. lines: from metrics.jsonl, [{"step": …, name: value, …}, …], where "samples" is
    {file: caption}.
    """
    newest = {}
    curves = collections.defaultdict(list)
    for metrics in lines:
        newest |= metrics
        if "test_loss" in metrics:  # curves do not include the test set
            continue
        for name, value in metrics.items():
            # Leave out the step and samples_seen, which would be straight lines.
            if isinstance(value, (int, float)) and name not in ("step", "samples_seen"):
                curves[name].append((metrics["step"], value))
    samples = newest.pop("samples", {})
    figures = [figure(folder / file, caption) for file, caption in samples.items()]
    newest_samples = f"<h2>Newest samples</h2><div>{''.join(figures)}</div>" if figures else ""
    charts = [chart(name, points) for name, points in curves.items() if len(points) > 1]
    settings = config.read_json(folder / "config.json")
    title = html.escape(str(folder))
    page = f"""<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1>
{newest_samples}
<h2>Curves</h2><div>{"".join(charts)}</div>
<h2>Newest metrics</h2>{table(newest)}
<h2>Settings</h2>{table(settings)}"""
    with checkpoint.atomic_write(folder / "report.html") as file:
        file.write(page.encode(errors="backslashreplace"))


def figure(path, caption):
    """HTML of a sample, a PNG or WAV file, with its caption."""
    media = MEDIA[path.suffix].format(base64.b64encode(path.read_bytes()).decode())
    caption = html.escape(f"{path.name} {caption}")
    return f"<figure><figcaption>{caption}</figcaption>{media}</figure>"


def chart(name, points):
    """HTML of the curve [(step, value), ...], with at most POINTS points, including the newest."""
    points = points[:: -math.ceil(len(points) / POINTS)]
    steps, values = zip(*points)
    left = min(steps)
    low = min(values)
    high = max(values)
    width = max(steps) - left or 1
    height = high - low or 1
    corners = [f"{step},{-value}" for step, value in points]  # in SVG, y points down
    caption = f"{name} {values[0]:.4g} ({low:.4g} to {high:.4g}, step {left} to {steps[0]})"
    return (
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<svg width="400" height="200" viewBox="{left} {-high} {width} {height}" '
        'preserveAspectRatio="none"><polyline fill="none" stroke="#2563eb" '
        f'vector-effect="non-scaling-stroke" points="{" ".join(corners)}"/></svg></figure>'
    )


def table(values):
    """An HTML table of {name: value}."""
    rows = [
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in values.items()
    ]
    return f"<table>{''.join(rows)}</table>"
