"""What a page is made of, and how it becomes Markdown and one self-contained HTML file."""

import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from topoep_titan.errors import InputError
from topoep_titan.reports.figures import Figure
from topoep_titan.reports.tables import Table
from topoep_titan.results import write_atomically


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str  # `code` is the only markup


@dataclass(frozen=True)
class Code:
    text: str
    summary: str = ""  # given: a block that opens on a click


@dataclass(frozen=True)
class Steps:
    """Values of every layer at every step, behind a slider."""

    title: str
    steps: list[int]
    rows: dict[str, list[list[float | None]]]  # name -> (layers, steps)


@dataclass(frozen=True)
class Folded:
    """A part of its own, closed until it is clicked and left out of the page's sections.

    Markdown cannot fold figures, so it has ``short`` instead.
    """

    title: str
    blocks: list["Block"]
    short: list["Block"]


Block = Folded | Heading | Paragraph | Code | Table | Steps | list[Figure]


def write_page(out_dir: Path, name: str, title: str, blocks: list[Block], **more: str) -> Path:
    """Write ``name``.html and ``name``.md, and the files of ``more``; return the HTML path.

    Nothing is written before everything is rendered. Raises InputError for an unwritable folder.
    """
    texts = {
        **{file.replace("_", ".", 1): text for file, text in more.items()},
        f"{name}.md": _markdown(title, blocks),
        f"{name}.html": _html(title, blocks),
    }
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            write_atomically(out_dir / file, text)
    except OSError as error:
        raise InputError(
            f"cannot write the report to {out_dir} ({error.strerror}); choose another folder"
        ) from None
    return out_dir / f"{name}.html"


def _markdown(title: str, blocks: list[Block]) -> str:
    return "\n\n".join([f"# {title}", *_markdown_parts(blocks)]) + "\n"


def _markdown_parts(blocks: list[Block]) -> list[str]:
    parts = []
    for block in blocks:
        match block:
            case Folded(title, _, short):
                parts += [f"## {title}", *_markdown_parts(short)]
            case Heading(text):
                parts.append(f"## {text}")
            case Paragraph(text):
                parts.append(text)
            case Code(text, summary):
                fence = f"```\n{text}\n```"
                opened = f"<details><summary>{escape(summary)}</summary>\n\n{fence}\n\n</details>"
                parts.append(opened if summary else fence)
            case Table():
                parts.append(block.to_markdown())
            case Steps():
                parts.append(f"{block.title}: a slider over steps in `report.html`.")
            case list():
                lines = [f"- **{figure.title}.** {figure.caption}" for figure in block]
                parts.append("\n".join(["Drawn in `report.html`:", "", *lines]))
    return parts


def _html_parts(blocks: list[Block], heading: str = "h2") -> list[str]:
    body = []
    for block in blocks:
        match block:
            case Folded(title, inner, _):
                parts = "\n".join(_html_parts(inner, "h3"))
                opened = f"<summary><h2>{escape(title)}</h2></summary>\n{parts}"
                body.append(f'<details class="folded">{opened}</details>')
            case Heading(text):
                body.append(f'<{heading} id="{_anchor(text)}">{escape(text)}</{heading}>')
            case Paragraph(text):
                body.append("<p>" + re.sub("`([^`]*)`", r"<code>\1</code>", escape(text)) + "</p>")
            case Code(text, summary):
                code = f"<pre><code>{escape(text)}</code></pre>"
                opened = f"<details><summary>{escape(summary)}</summary>{code}</details>"
                body.append(opened if summary else code)
            case Table():
                body.append(block.to_html())
            case Steps():
                body.append(_slider(block))
            case list():
                drawn = "\n".join(
                    f"<figure><h3>{escape(figure.title)}</h3>{figure.svg}"
                    f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
                    for figure in block
                )
                body.append(f'<div class="figures">{drawn}</div>')
    return body


def _html(title: str, blocks: list[Block]) -> str:
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text() for kind in ("css", "js"))
    headings = [block.text for block in blocks if isinstance(block, Heading)]
    links = " ".join(f'<a href="#{_anchor(text)}">{escape(text)}</a>' for text in headings)
    content = "\n".join(_html_parts(blocks))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="Sections">{links}</nav>
<main>
{content}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _slider(block: Steps) -> str:
    """A cell a layer and row; page.js fills them for the step that the slider stands on."""
    rounded = {
        name: [[None if v is None else round(v, 3) for v in layer] for layer in layers]
        for name, layers in block.rows.items()
    }
    data = json.dumps({"steps": block.steps, "rows": rounded}).replace("<", "\\u003c")
    layers = len(next(iter(block.rows.values())))
    heads = "".join(f"<th scope='col'>{layer}</th>" for layer in range(layers))
    lines = "".join(
        f"<tr><th scope='row'>{escape(name)}</th>{'<td></td>' * layers}</tr>" for name in block.rows
    )
    last = len(block.steps) - 1
    return (
        f'<figure class="steps"><h3>{escape(block.title)}</h3>'
        f"<label>step <output>{block.steps[-1]}</output> "
        f'<input type="range" min="0" max="{last}" value="{last}" '
        f'aria-label="step, {escape(block.title)}"></label>'
        f'<div class="scroll"><table><thead><tr><th scope="col">MoE layer</th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _anchor(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")
