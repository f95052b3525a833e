"""The demo's sources: markup out by hand, and what a machine without apt-get gives."""

from pathlib import Path

from data.clean import SECTION_BYTES, manual_page, sections
from data.config import load_config
from data.demo import SOURCES

ROOT = Path(__file__).resolve().parents[2]


def test_manual_page_by_hand():
    page = r""".\" a comment
.TH LS 1 2022
.de IX
\\$1
..
.SH "名称"
ls \- 列出\fB目录\fP内容
.TP
\fB\-a\fR, \fI\,名\/\fP
用 \(aqx\(aq 与 C:\en \*(Aq \s-1GNU\s0
.BR cat (1)
"""
    assert manual_page(page) == ["名称\nls - 列出目录内容\n\n-a, 名\n用 'x' 与 C:\\n  GNU\ncat (1)"]


def test_sections_lose_nothing_and_cut_at_blank_lines():
    paragraphs = [f"paragraph {i} " + "x" * 3000 for i in range(8)]
    pieces = sections("\n\n".join(paragraphs))
    assert "\n\n".join(pieces) == "\n\n".join(paragraphs)
    assert [piece.count("paragraph") for piece in pieces] == [3, 3, 2]
    assert all(len(piece.encode()) >= SECTION_BYTES for piece in pieces[:-1])


def test_without_debian_tools_the_missing_part_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    parts, missing = SOURCES["english"].parts()
    assert missing == "apt-get and dpkg-deb not found (not a Debian system)"
    assert [part.licence for part in parts] == ["PSF-2.0"]  # the part that Python ships
    assert SOURCES["chinese"].parts() == ([], missing)


def test_standard_library_is_python_and_holds_no_path_of_this_machine():
    (part,), missing = SOURCES["python"].parts()
    files = dict(part.files)
    assert missing is None
    assert b"def namedtuple" in files["collections/__init__.py"]
    assert not any("sysconfigdata" in name or "site-packages" in name for name in files)


def test_demo_config_names_every_demo_source():
    config = load_config(ROOT / "toml_configs" / "data" / "demo.toml")
    assert [source.name for source in config.sources] == list(SOURCES)
