"""Positions of labels beside the points of a figure, so that none covers another or a point. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# In pixels, as far as that can be said before a browser draws: a figure of an ordinary window, and its letters.
_WIDTH, _HEIGHT, _LETTER, _LINE, _AWAY = 1080.0, 320.0, 7.0, 15.0, 14.0
_GAP = "\u00a0\u00a0"  # keeps a text off the ring around its point

Box = tuple[float, float, float, float]  # left, top, right, bottom


def place_labels(texts: Mapping[str, str], points: Mapping[str, tuple[float, float]]) -> dict[str, tuple[str, str]]:
    """Return name -> its text and Plotly's `textposition`; the text is "" if there is no space for it.

    Args:
        texts: name -> its text.
        points: name -> its position, from 0 to 1 from left to right and from the bottom to the top.
    """
    centers = {name: (x * _WIDTH, (1 - y) * _HEIGHT) for name, (x, y) in points.items()}
    taken: list[Box] = [(x - _AWAY / 2, y - _AWAY / 2, x + _AWAY / 2, y + _AWAY / 2) for x, y in centers.values()]
    labels = {}
    for name, text in texts.items():
        labels[name] = ("", "middle right")
        for position, box in _boxes(*centers[name], len(text) * _LETTER).items():
            inside = box[0] >= 0 and box[2] <= _WIDTH and box[1] >= 0 and box[3] <= _HEIGHT
            if text and inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                labels[name] = (_GAP + text + _GAP if position.startswith("middle") else text, position)
                break
    return labels


def _boxes(x: float, y: float, width: float) -> dict[str, Box]:
    half = _LINE / 2
    return {
        "middle right": (x + _AWAY, y - half, x + _AWAY + width, y + half),
        "middle left": (x - _AWAY - width, y - half, x - _AWAY, y + half),
        "top center": (x - width / 2, y - _AWAY - _LINE, x + width / 2, y - _AWAY),
        "bottom center": (x - width / 2, y + _AWAY, x + width / 2, y + _AWAY + _LINE),
    }


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
