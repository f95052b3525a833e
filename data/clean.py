"""From a file's text to documents: whole, in sections, or out of a manual page's markup."""

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
