"""The statistics of a set for people: lines for the terminal, one self-contained HTML page."""

from html import escape
from typing import Any

from data.shards import Manifest

DROPPED = {
    "quarantined": "bad record",
    "excluded": "of another source",
    "empty": "empty",
    "duplicates": "repeat in its file",
    "across": "repeat elsewhere",
    "near": "near-duplicate",
}


def summary(manifest: Manifest, counts: dict[str, Any]) -> str:
    """A few lines: what there is, what was dropped and why, and what fell short."""
    lines = [f"note: MISSING of {what}" for what in manifest.missing]
    for index, source in enumerate(manifest.sources):
        dropped = _dropped(counts, index)
        reasons = ", ".join(f"{n:,} {DROPPED[why]}" for why, n in dropped.items() if n)
        lines.append(
            f"{source['name']}: {source['tokens']['train']:,} train tokens in "
            f"{source['documents']['train']:,} documents; "
            f"{source['read'].get('records', 0):,} records read"
            + (f", dropped: {reasons}" if reasons else "")
        )
        if source["tokens"]["train"] < 0.97 * source["budget"]:
            lines.append(
                f"note: {source['name']} ended at {source['tokens']['train']:,} of "
                f"{source['budget']:,} tokens"
            )
    for split, values in manifest.splits.items():
        lines.append(
            f"{split}: {values['tokens']:,} tokens in {values['sequences']:,} sequences of "
            f"{manifest.seq_len}"
        )
    lines.append(f"fill rate {counts['fill']:.4f} ({manifest.config['packing']})")
    return "\n".join(lines)


def page(manifest: Manifest, counts: dict[str, Any]) -> str:
    """Documents, tokens, reasons, repeats between sources, lengths, licences."""
    names = counts["sources"]
    dropped = [_dropped(counts, index) for index in range(len(names))]
    tokens = [
        [
            source["name"],
            source["read"].get("records", 0),
            *dropped[index].values(),
            source["read"].get("repaired", 0),
            counts["cut"][index],
            source["documents"]["train"],
            source["tokens"]["train"],
            source["budget"],
            counts["bytes_a_token"][index],
            source["tokens"]["validation"],
        ]
        for index, source in enumerate(manifest.sources)
    ]
    head = [
        "source", "records", *DROPPED.values(), "repaired", "cut at 4,095", "train documents",
        "train tokens", "budget", "bytes a token", "validation tokens",
    ]  # fmt: skip
    bits = [f"{2**bit:,}" for bit in range(len(counts["lengths"][0]))]
    inputs = [
        [source["name"], part["origin"], part["licence"], part["documents"], part["bytes"],
         part["sha256"][:16], part["partial"] or ""]
        for source in manifest.sources
        for part in source["inputs"]
    ]  # fmt: skip
    splits = [
        [split, *(values[key] for key in ("documents", "tokens", "sequences")),
         values["order_sha256"][:16]]
        for split, values in manifest.splits.items()
    ]  # fmt: skip
    sections = [
        _table("Splits", ["split", "documents", "tokens", "sequences", "order"], splits),
        _table("Sources", head, tokens),
        _table(
            "Exact duplicates between files: dropped from (row), survivor in (column)",
            ["", *names],
            [[name, *row] for name, row in zip(names, counts["duplicates"])],
        ),
        _table(
            "Near-duplicates: dropped from (row), survivor in (column)",
            ["", *names],
            [[name, *row] for name, row in zip(names, counts["near_duplicates"])],
        )
        if manifest.config["near_dedup"]
        else "<p>Near-dedup was off.</p>",
        "<h2>Lengths of the train documents</h2>",
        *(_histogram(name, bits, row) for name, row in zip(names, counts["lengths"])),
        _table(
            "Inputs",
            ["source", "origin", "licence", "documents", "bytes", "sha256", "broken off"],
            inputs,
        ),
        *(f"<p>MISSING of {escape(what)}</p>" for what in manifest.missing),
    ]
    title = f"Corpus {escape(manifest.name)}"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        f"<p>sha256 {manifest.sha256}; vocabulary {manifest.vocab_size:,}; packing "
        f"{manifest.config['packing']}, fill rate {counts['fill']:.4f} at {manifest.seq_len} "
        "tokens.</p>\n" + "\n".join(sections) + "\n</html>\n"
    )


def _dropped(counts: dict[str, Any], index: int) -> dict[str, int]:
    read = counts["read"][index]
    own = {why: read.get(why, 0) for why in ("quarantined", "excluded", "empty", "duplicates")}
    across = sum(counts["duplicates"][index])
    return own | {"across": across, "near": sum(counts["near_duplicates"][index])}


def _table(title: str, head: list[str], rows: list[list[Any]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<h2>{escape(title)}</h2>\n<table><tr>{cells}</tr>\n{body}</table>"


def _histogram(name: str, labels: list[str], counts: list[int]) -> str:
    most = max([1, *counts])
    bars = "".join(
        f'<span class="bar" style="height:{60 * count / most:.1f}px" '
        f'title="from {label} tokens: {count:,} documents"></span>'
        for label, count in zip(labels, counts)
    )
    return (
        f"<figure>{bars}<figcaption>{escape(name)}: 1 to {labels[-1]} tokens, each bar doubles; "
        f"{sum(counts):,} documents</figcaption></figure>"
    )


def _shown(cell: Any) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{padding:.2rem .6rem;border-bottom:1px solid #8884;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    "figure{display:inline-block;margin:.5rem 1.5rem .5rem 0}"
    ".bar{display:inline-block;width:14px;margin-right:2px;background:#3b6ea5}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}}"
)
