"""A matplotlib canvas -> SVG text that takes its colours and its font from the page around it.

No background; ink is ``currentColor`` and the grid ``var(--grid)``, so the page's light and dark
themes apply. Text stays text. Equal input gives equal bytes.
"""

import io
import re
from html import escape

import matplotlib
from matplotlib.figure import Figure as Canvas

# Stand-ins that become CSS values, because matplotlib knows no currentColor.
INK, GRID = "#010203", "#fafbfc"
STYLE = {
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "font.family": "DejaVu Sans",  # matplotlib's own: the layout does not depend on the machine
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.3,
}


def svg_text(canvas: Canvas, *, salt: str, label: str) -> str:
    """``salt`` keeps the ids of a page's figures apart; ``label`` is what a screen reader says."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML prologue, which names an address
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"#([\w.-]+)", svg))  # by clip paths and markers; other ids would repeat
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)  # the page sizes it
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    return re.sub(r"\s*\n\s*", "\n", svg)
