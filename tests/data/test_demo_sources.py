"""The stand-ins: markup out by hand, exact containers, and a machine without apt-get."""

import json
import zlib
from pathlib import Path

import pyarrow.parquet as pq

from data import demo
from data.clean import SECTION_BYTES, manual_page, novel, paper, sections
from data.config import load_config
from data.inputs import list_inputs
from data.texts import STAND_INS, Text, r_strings, standard_library

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


def test_paper_by_hand():
    source = r"""\documentclass{article}
\title{On \emph{testing}}
\Abstract{We test.}
\begin{document}
% a comment
\section{Results} See \cite{a}$x = 5\%$.
<<echo=FALSE>>=
plot(x)
@
Done.
\end{document}
"""
    (text,) = paper(source)
    assert text == "On testing\n\nWe test.\n\nResults See $x = 5\\%$.\n\nDone."


def test_sections_lose_nothing_and_cut_at_blank_lines():
    paragraphs = [f"paragraph {i} " + "x" * 3000 for i in range(8)]
    pieces = sections("\n\n".join(paragraphs))
    assert "\n\n".join(pieces) == "\n\n".join(paragraphs)
    assert [piece.count("paragraph") for piece in pieces] == [3, 3, 2]
    assert all(len(piece.encode()) >= SECTION_BYTES for piece in pieces[:-1])
    assert novel("Preface\nCHAPTER I\none\nCHAPTER II\ntwo") == [
        "Preface", "CHAPTER I\none", "CHAPTER II\ntwo",
    ]  # fmt: skip


def test_r_strings_by_hand():
    data = b"".join(b"\x00\x04\x00\x09" + len(s).to_bytes(4) + s for s in [b"line"] * 1001)
    index = zlib.compress(b"\x00\x04\x00\x09\x00\x00\x00\x01x")
    content = b"\0\0\0\0" + index + b"\0\0\0\0" + zlib.compress(data)
    assert list(r_strings([("a", content)])) == [("a/1", b"\n".join([b"line"] * 1001))]


def test_standard_library_is_python_and_holds_no_path_of_this_machine():
    files = dict(standard_library())
    assert b"def namedtuple" in files["cpython/collections/__init__.py"]
    assert not any("sysconfigdata" in name or "site-packages" in name for name in files)


def test_mirrors_have_the_datasets_names_and_schemas(monkeypatch, tmp_path):
    """Without network: two texts of our own; Debian's are named as missing."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get
    own = Text("hand", "CC0-1.0", lambda text: [text], own=lambda: [("a/b.rs", b"fn main() {}")])
    texts = {
        name: (own, *(text for text in given if text.package)) for name, given in STAND_INS.items()
    }
    monkeypatch.setattr(demo, "STAND_INS", texts)
    monkeypatch.setattr(demo, "problems", lambda: ("hand", "CC0-1.0", [("1 + 1?", "2")]))
    demo.write_stand_ins(tmp_path / "stand-ins")
    config = (ROOT / "toml_configs" / "data" / "demo.toml").read_text()
    path = tmp_path / "demo.toml"
    path.write_text(config.replace("outputs/data", str(tmp_path)))
    items, missing = list_inputs(load_config(path))
    assert len(items) == 9  # one of our files each, and the problems
    reason = "apt-get and dpkg-deb not found (not a Debian system)"
    assert f"fineweb: {reason}" in missing
    published = {  # section 1.1 of each dataset's card
        "fineweb": "text id dump url date file_path language language_score token_count",
        "starcoderdata-rust": "max_stars_repo_path max_stars_repo_name max_stars_count id content",
        "dapo": "data_source prompt ability reward_model extra_info",
    }
    for name, columns in published.items():
        (file,) = (tmp_path / "stand-ins" / name).rglob("*.parquet")
        table = pq.read_table(file)
        assert table.column_names == columns.split()
        assert table.num_rows == (100 if name == "dapo" else 1)
    origins = json.loads((tmp_path / "stand-ins" / "pes2o" / "origins.json").read_text())
    assert origins["files"]["data/v2/train-00000-of-00001.json.gz"]["licence"] == "CC0-1.0"
