"""Built-in data, made from a seed: captioned shapes whose attributes are known exactly.

    images, records = synthetic.shapes(range(20_000))          # uint8 (20000, 32, 32, 3), one record each
    pictures = synthetic.draw([record["attributes"] for record in records], size=64, seed=1)

A caption names only some attributes, so one caption fits many images and a model of images given
captions has something left to decide. Row k is a pure function of (seed, k).
"""
import itertools
from collections.abc import Sequence

import numpy as np

# Five places of which no two lie on a line with the picture's edges, and shapes that turning by a few degrees does not
# make alike (no hexagon beside a circle, no diamond beside a square): each value can be told at 16x16 pixels.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": ("circle", "square", "triangle", "star", "ring", "cross", "heart", "moon"),
    "color": ("red", "yellow", "green", "cyan", "blue", "pink"),
    "size": ("small", "large"),
    "place": ("top left", "top right", "center", "bottom left", "bottom right"),
    "background": ("white", "gray", "black"),
}
COLORS = {
    "red": (215, 30, 30), "yellow": (245, 205, 20), "green": (25, 150, 50), "cyan": (30, 205, 225),
    "blue": (35, 60, 215), "pink": (250, 110, 205), "white": (245, 245, 245), "gray": (128, 128, 128),
    "black": (18, 18, 18),
}
NEW_COLORS = {"purple": (135, 40, 175), "orange": (240, 125, 15), "brown": (115, 70, 30)}  # none of the data's own
HALF_WIDTH = {"small": 0.21, "large": 0.33}  # of the picture's width
CENTERS = {"top left": (0.31, 0.31), "top right": (0.69, 0.31), "center": (0.5, 0.5),
           "bottom left": (0.31, 0.69), "bottom right": (0.69, 0.69)}  # x to the right, y down
NAMED = {"shape": 0.85, "color": 0.8, "size": 0.5, "place": 0.55, "background": 0.4}  # chance of being in a caption
DRAWS = 24  # uniform numbers a row is made from: 5 attributes, 6 for drawing, 13 for the caption


def shapes(rows: Sequence[int], seed: int = 0, size: int = 32, color: str = "") -> tuple[np.ndarray, list[dict]]:
    """Draw the given rows of the endless data set `seed`, all in one `color`, which may be a new one, if it is given.

    Returns uint8 images (N, H, W, 3) with H = W = `size` and a record for each: its "caption", all five "attributes"
    and the names of those that the caption mentions, "named".
    """
    uniform = _uniform(seed, rows)  # (N, DRAWS)
    records = []
    for u in uniform:
        attributes = {name: values[int(x * len(values))] for x, (name, values) in zip(u, ATTRIBUTES.items())}
        attributes["color"] = color or attributes["color"]
        named = [name for x, name in zip(u[11:], ATTRIBUTES) if x < NAMED[name]]
        named = named or [list(ATTRIBUTES)[int(u[16] * len(ATTRIBUTES))]]
        said = {name: attributes[name] for name in named}
        records.append({"caption": _caption(said, u[17:]), "attributes": attributes, "named": named})
    return _render([record["attributes"] for record in records], uniform[:, 5:11], size), records


def draw(attributes: Sequence[dict[str, str]], size: int = 32, seed: int | None = None) -> np.ndarray:
    """Draw pictures of given attributes (all five each): uint8 (N, H, W, 3).

    Without a seed each is the plain one; with a seed, shifts, turns and shades vary as in `shapes`.
    """
    varied = np.full((len(attributes), 6), 0.5) if seed is None else _uniform(seed, range(len(attributes)))[:, 5:11]
    return _render(attributes, varied, size)


def _uniform(seed: int, rows: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1) of shape (N, DRAWS), each a hash of (seed, row, column): splitmix64 (Steele et al. 2014)."""
    rows = np.asarray(rows, dtype=np.int64).astype(np.uint64).reshape(-1, 1)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    x = mix(np.full((1, 1), seed % 2**64, np.uint64) + step)
    x = mix(mix(x + rows * step) + np.arange(1, DRAWS + 1, dtype=np.uint64) * step)
    return (x >> np.uint64(11)) * 2.0**-53


def _render(attributes: Sequence[dict[str, str]], varied: np.ndarray, size: int) -> np.ndarray:
    """Pictures (N, H, W, 3) from attributes and six numbers in [0, 1) each: shift x and y, turn, scale, two shades."""
    images = np.empty((len(attributes), size, size, 3), np.uint8)
    grid = ((np.arange(size) + 0.5) / size).astype(np.float32)  # centers of the pixels
    varied = varied.astype(np.float32) * 2 - 1
    for shape in ATTRIBUTES["shape"]:
        rows = np.array([i for i, a in enumerate(attributes) if a["shape"] == shape], dtype=np.int64)
        for part in np.array_split(rows, len(rows) // 256 + 1):  # so few that the arrays below stay in the cache
            those, vary = [attributes[i] for i in part], varied[part].T[:, :, None, None]  # (6, n, 1, 1)
            center = np.array([CENTERS[a["place"]] for a in those], np.float32).reshape(-1, 2).T[:, :, None, None]
            scale = np.array([HALF_WIDTH[a["size"]] for a in those], np.float32)[:, None, None] * (1 + 0.06 * vary[3])
            x = (grid[None, None, :] - center[0] - 0.03 * vary[0]) / scale  # (n, 1, W)
            y = (center[1] + 0.03 * vary[1] - grid[None, :, None]) / scale  # (n, H, 1), upward
            cos, sin = np.cos(0.2 * vary[2]), np.sin(0.2 * vary[2])  # a turn of at most 11 degrees
            distance = _signed_distance(shape, cos * x + sin * y, cos * y - sin * x) * scale  # (n, H, W)
            inside = np.clip(0.5 - distance * size, 0, 1)[..., None]  # the edge is one pixel wide
            front = np.array([{**COLORS, **NEW_COLORS}[a["color"]] for a in those], np.float32).reshape(-1, 1, 1, 3)
            back = np.array([COLORS[a["background"]] for a in those], np.float32).reshape(-1, 1, 1, 3)
            front, back = front * (1 + 0.12 * vary[4])[..., None], back + 14 * vary[5][..., None]
            images[part] = np.clip(back + inside * (front - back) + 0.5, 0, 255)
    return images


def _signed_distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distance to the outline of a shape that fills about [-1, 1], negative inside; near the outline it is exact."""
    radius = np.hypot(x, y)
    if shape == "circle":
        return radius - 0.97
    if shape == "ring":
        return np.abs(radius - 0.75) - 0.27
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85
    if shape == "triangle":
        return np.maximum(-y, np.abs(x) * 0.8660254 + y * 0.5) - 0.58
    if shape == "cross":
        x, y = np.abs(x), np.abs(y)
        return np.minimum(np.maximum(x - 1, y - 0.33), np.maximum(x - 0.33, y - 1))
    if shape == "moon":  # a disc with another taken out
        return np.maximum(radius - 1, 0.85 - np.hypot(x - 0.55, y - 0.1))
    if shape == "heart":  # a square on its corner, with a disc on each of the upper sides
        x, y = np.abs(x), y + 0.05
        return np.minimum(np.maximum(x + y, x - y) * 0.7071068 - 0.62, np.hypot(x - 0.44, y - 0.44) - 0.62)
    assert shape == "star", shape
    angle = np.arctan2(x, y) % (0.4 * np.pi)  # fold the five points onto half a point
    angle = np.minimum(angle, 0.4 * np.pi - angle)
    edge = np.array([0.5 * np.cos(0.2 * np.pi) - 1.12, 0.5 * np.sin(0.2 * np.pi)])  # from the tip to the inner corner
    normal = np.array([edge[1], -edge[0]], np.float32) / np.float32(np.hypot(*edge))
    return (radius * np.cos(angle) - 1.12) * normal[0] + radius * np.sin(angle) * normal[1]


def _caption(said: dict[str, str], u: np.ndarray) -> str:
    """A caption that mentions what is in `said`, worded by the numbers `u` in [0, 1)."""
    size, color, shape = said.get("size"), said.get("color"), said.get("shape")
    adjectives = [word for word in (size, color) if word]
    if shape and adjectives and u[0] < 0.15:
        text = f"a {shape} that is {' and '.join(adjectives)}"
    elif shape or (adjectives and u[0] < 0.5):
        text = " ".join(["a", *adjectives, shape or "shape"])
    else:
        text = " ".join(["something", " and ".join(adjectives)]).strip()
    place, background = said.get("place"), said.get("background")
    if background:
        article = f"{'on' if u[1] < 0.8 else 'against'} a {background} background"
        background = article if u[2] < 0.7 else f"on {background}"
    if place:
        corner = place != "center" and u[3] < 0.25
        place = f"in the {place} corner" if corner else f"{'in' if place == 'center' else 'at'} the {place}"
    after = [part for part in ((place, background) if u[4] < 0.7 else (background, place)) if part]
    if after and u[5] < 0.12:  # sometimes the surroundings come first
        return f"{' '.join(after)}, {text}"
    return " ".join([text, *after])


class Judge:
    """Tells the attributes of a picture, in pixels: those of the nearest of many drawn ones.

    The drawn ones are all combinations of attributes, VARIED times each. So a named attribute is right if the right
    value wins against its alternatives. No network has a say in it; real pictures pass at 0.96, which is the ceiling.
    `color` is one more alternative.
    """

    SIZE, VARIED = 16, 8

    def __init__(self, color: str = ""):
        self.alternatives = ATTRIBUTES | {"color": ATTRIBUTES["color"] + ((color,) if color else ())}
        combined = [dict(zip(ATTRIBUTES, values)) for values in itertools.product(*self.alternatives.values())]
        drawn = [self._features(draw(combined, seed=seed)) for seed in range(self.VARIED)]
        self.drawn, self.values = np.concatenate(drawn), np.tile(self._numbers(combined), (self.VARIED, 1))
        self.squares = np.square(self.drawn).sum(1)

    def _features(self, pictures: np.ndarray) -> np.ndarray:
        """uint8 (N, H, H, 3), H a multiple of 16, averaged over boxes -> float (N, 768)."""
        count, height, box = len(pictures), pictures.shape[1], pictures.shape[1] // self.SIZE
        assert box * self.SIZE == height, f"{height} pixels are not a multiple of {self.SIZE}"
        boxes = pictures.reshape(count, self.SIZE, box, self.SIZE, box, 3).astype(np.float32)
        return boxes.mean((2, 4)).reshape(count, -1) / 255

    def _numbers(self, attributes: Sequence[dict[str, str]]) -> np.ndarray:
        return np.array([[values.index(a[name]) for name, values in self.alternatives.items()] for a in attributes])

    def right(self, pictures: np.ndarray, records: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """(which attributes of the records uint8 pictures (N, H, H, 3) have, which are named), each (N, attributes)."""
        nearest = (self.squares - 2 * self._features(pictures) @ self.drawn.T).argmin(1)
        named = np.array([[name in record["named"] for name in ATTRIBUTES] for record in records])
        return self.values[nearest] == self._numbers([record["attributes"] for record in records]), named
