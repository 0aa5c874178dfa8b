"""Draws horizontal bars as an SVG that reads well on light and dark pages. Knows no benchmark."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

#: In pixels: the picture's width, where the bars begin and end, and the height of a row.
WIDTH, LEFT, RIGHT, ROW = 720, 190, 600, 26

STYLE = """
svg { font: 13px ui-sans-serif, system-ui, sans-serif; }
text { fill: #1f2328; }
.first { fill: #4c8dd6; } .second { fill: #9a6700; } .third { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.first { fill: #388bfd; } .second { fill: #d29922; } .third { fill: #3fb950; }
}
"""
_CLASSES = ("first", "second", "third")


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: its label, its value, and which of the three colours it has."""

    label: str
    value: float
    colour: int = 0


def draw(title: str, bars: Sequence[Bar], *, unit: str) -> str:
    """The picture; all bars have one scale, from 0 to the largest value."""
    largest = max(*(bar.value for bar in bars), 1e-12)
    height = ROW * (len(bars) + 1) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text x="8" y="18" font-weight="600">{html.escape(title)}</text>',
    ]
    for row, bar in enumerate(bars, start=1):
        top = row * ROW + 6
        length = max(0.0, bar.value) / largest * (RIGHT - LEFT)
        label, value = html.escape(bar.label), html.escape(f"{bar.value:,.3g} {unit}")
        area, colour = f'y="{top}" width="{length:.1f}"', _CLASSES[bar.colour]
        lines += [
            f'<text x="{LEFT - 8}" y="{top + 14}" text-anchor="end">{label}</text>',
            f'<rect class="{colour}" x="{LEFT}" {area} height="{ROW - 8}" rx="3"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{top + 14}">{value}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
