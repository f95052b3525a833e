"""From a stand-in's file to documents: whole, in sections, or out of the markup around the text."""

import re

SECTION_BYTES = 8_000  # about 2,000 tokens: half of the longest document


def whole(text: str) -> list[str]:
    return [text]


def sections(text: str) -> list[str]:
    """Cut a book at blank lines into pieces of at least SECTION_BYTES of UTF-8."""
    pieces, piece, size = [], [], 0
    for paragraph in re.split(r"\n[ \t]*\n", text):
        piece.append(paragraph)
        size += len(paragraph.encode())
        if size >= SECTION_BYTES:
            pieces.append("\n\n".join(piece))
            piece, size = [], 0
    return [*pieces, "\n\n".join(piece)]


def novel(text: str) -> list[str]:
    """Chapters, cut further where they are long."""
    chapters = re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME) [^\n]*\n)", text)
    return [piece for chapter in chapters for piece in sections(chapter)]


def paper(source: str) -> list[str]:
    """Title, abstract and body of an R vignette (LaTeX or Markdown), in sections.

    Code chunks, comments and the preamble go; a command keeps its argument, formulas stay.
    """
    title = re.search(r"\\title\{(?:[^{}]|\{[^{}]*\})*\}|^title:[^\n]*", source, re.MULTILINE)
    abstract = re.search(
        r"\\Abstract\{(?:[^{}]|\{[^{}]*\})*\}|\\begin\{abstract\}.*?\\end\{abstract\}",
        source,
        re.DOTALL,
    )
    body = source.partition(r"\begin{document}")[2] or re.sub(
        r"\A---\n.*?\n---\n", "", source, flags=re.DOTALL
    )
    head = "\n\n".join(found[0] for found in (title, abstract) if found)
    text = f"{head}\n\n{body}"
    text = re.sub(r"^<<.*?>>=.*?^@|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?m)(?<!\\)%.*$", "", text)
    text = re.sub(
        r"\\(?:begin|end|label|cite\w*|bibliography\w*|vspace|hspace)\*?\{[^}]*\}", "", text
    )
    for _ in range(4):  # from the innermost command outwards
        text = re.sub(r"\\(?:[A-Z]?[a-z]+)\*?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^title:\s*", "", text.strip())
    return sections(re.sub(r"\n[ \t]*(?:\n[ \t]*)+", "\n\n", text))


def manual_page(roff: str) -> list[str]:
    """The running text of a man page (man macros): headings and paragraphs without the markup."""
    lines = []
    roff = re.sub(r"^\.de\b.*?^\.\.$", "", roff, flags=re.MULTILINE | re.DOTALL)  # own macros
    for line in roff.splitlines():
        if line.startswith((".", "'")):
            macro, _, arguments = line[1:].strip().partition(" ")
            if macro in _HEADINGS or macro in _PARAGRAPHS:
                lines.append("")
            if macro in _HEADINGS or macro in _FONTS:
                lines.append(arguments.replace('"', ""))
        else:
            lines.append(line)
    text = _ESCAPE.sub(_plain, "\n".join(lines))
    return [re.sub(r"\n{3,}", "\n\n", text).strip()]


def _plain(escape: re.Match) -> str:
    if glyph := escape["glyph"]:
        return _GLYPHS.get(glyph, glyph)
    return {None: "", "e": "\\"}.get(escape["char"], escape["char"])


_HEADINGS = {"SH", "SS", "Sh", "Ss"}
_PARAGRAPHS = {"PP", "P", "LP", "TP", "IP", "HP", "sp", "Pp"}
_FONTS = {"B", "I", "BR", "BI", "IB", "IR", "RB", "RI", "SM", "SB"}
_GLYPHS = {"aq": "'", "cq": "\u2019", "dq": '"', "co": "©", "bu": "•", "em": "—"}
_ESCAPE = re.compile(
    r"""\\(?: "[^\n]*                          # a comment
         | f(?:\(..|\[\w*\]|.)                # a font
         | s[+-]?\d+                          # a size
         | \*(?:\(..|\[[^]\n]*\]|.)            # a string
         | [&,/|^:%c]                         # spacing without width
         | \((?P<glyph>..)
         | (?P<char>.) )""",
    re.VERBOSE,
)
