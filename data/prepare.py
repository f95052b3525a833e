"""``python -m data.prepare CONFIG.toml --out DIR``: from a config to a finished shard set.

Stages: read (a task an input) -> plan (dedup, tokenizer, budgets) -> shards (a task each) ->
manifest. Killed at any point, the same command goes on with the tasks that are not done and ends
with the same bytes: every file appears whole, a task's record comes last, and the manifest, without
which a set does not open, comes after all. Between, everything is in DIR/.progress.

On a cluster: ``--task i/n`` makes the i-th of n parts of the stage that is open and stops;
``python -m data.merge`` then ends the stage. See data/README.md.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data import shards
from data.config import Config, load_config
from data.demo import write_stand_ins
from data.errors import DataError
from data.files import locked, space_left_or_say, write_whole
from data.inputs import Input, list_inputs
from data.manifest import make_manifest, statistics
from data.plan import Plan, make_plan, read_plan
from data.read import check_records, done, read_input, read_records_of
from data.report import page, summary
from data.shards import Manifest
from data.spool import forget
from data.tasks import run_tasks
from data.write import write_one, written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (all cores)")
    parser.add_argument("--allow-partial", action="store_true", help="accept files that broke off")
    parser.add_argument("--task", metavar="I/N", help="only part I (from 0) of N of the open stage")
    options = parser.parse_args(arguments)
    try:
        if options.task:
            run_part(options.config, options.out, options.task)
        else:
            prepare(
                options.config,
                options.out,
                workers=options.workers,
                allow_partial=options.allow_partial,
            )
    except DataError as error:
        print(f"data.prepare: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(
    config_path: Path, out: Path, *, workers: int = 1, allow_partial: bool = False
) -> Manifest:
    """Build the set, or go on, or say that it is there. Raises DataError."""
    if workers < 1:
        raise DataError(f"--workers is {workers}; give at least 1")
    config = load_config(config_path)
    with _reserved(out):
        if (out / "manifest.json").exists():
            return _finished(config, out)
        work, items, missing = _started(config, out)
        _read(items, config, work, range(len(items)), workers)
        plan = _planned(items, config, work, allow_partial)
        _write(plan, config, work, out, range(len(plan.shards)), workers)
        return finish(config, out, items, missing, plan)


def run_part(config_path: Path, out: Path, part: str) -> None:
    """Every n-th task of the open stage, from the i-th on. Several may run at the same time."""
    try:
        index, count = (int(number) for number in part.split("/"))
        if not 0 <= index < count:
            raise ValueError
    except ValueError:
        raise DataError(f"--task is {part!r}; give I/N with I from 0 to N - 1") from None
    config = load_config(config_path)
    with _reserved(out, alone=False):
        if (out / "manifest.json").exists():
            _finished(config, out)
            return
        work, items, _ = _started(config, out, over=False)
        plan = _current_plan(items, work)
        if plan is None:
            _read(items, config, work, range(index, len(items), count), 1)
        else:
            _write(plan, config, work, out, range(index, len(plan.shards), count), 1)


def merge(config_path: Path, out: Path, *, allow_partial: bool = False) -> None:
    """End the open stage: plan when all inputs are read, the manifest when all shards are made.

    Raises DataError when a task of the stage is not done.
    """
    config = load_config(config_path)
    with _reserved(out):
        if (out / "manifest.json").exists():
            _finished(config, out)
            return
        work, items, missing = _started(config, out)
        if lacking := [item for item in items if not done(item, work)]:
            raise DataError(
                f"{len(lacking)} of {len(items)} inputs are not read, the first is "
                f"{lacking[0].origin} (task {lacking[0].number}); run their tasks again"
            )
        plan = _current_plan(items, work)
        if plan is None:
            plan = _planned(items, config, work, allow_partial)
            print(f"plan: {len(plan.shards)} shards; now run --task for them, then merge again")
            return
        todo = [number for number in range(len(plan.shards)) if not written(number, plan, work)]
        if todo:
            raise DataError(
                f"{len(todo)} of {len(plan.shards)} shards are not made, the first is task "
                f"{todo[0]}; run their tasks again"
            )
        finish(config, out, items, missing, plan)


def finish(
    config: Config, out: Path, items: list[Input], missing: list[str], plan: Plan
) -> Manifest:
    """Manifest, report and quarantine; the working folder goes."""
    work = out / ".progress"
    parts = [written(number, plan, work) for number in range(len(plan.shards))]
    records = read_records_of(items, work)
    for name in ("tokenizer.json", "quarantine.jsonl"):
        content = (work / name).read_bytes()
        if content:
            write_whole(out / name, content)
    manifest = make_manifest(config, items, records, missing, plan, parts)
    counts = statistics(config, manifest, plan, parts)
    write_whole(out / "statistics.json", json.dumps(counts, indent=1).encode())
    write_whole(out / "report.html", page(manifest, counts).encode())
    shards.write_manifest(out, manifest)
    shutil.rmtree(work)
    print(summary(manifest, counts))
    print(f"{out}: sha256 {manifest.sha256}")
    return manifest


def _started(
    config: Config, out: Path, *, over: bool = True
) -> tuple[Path, list[Input], list[str]]:
    """The working folder, kept if a run was making the same set, and the inputs.

    ``over``: start over when it was making another one; otherwise that is a DataError.
    """
    work = out / ".progress"
    wanted = json.dumps({"format": shards.FORMAT, "config": config.as_dict()}, indent=1).encode()
    path = work / "config.json"
    with locked(out.parent):  # tasks of one set may start at the same time
        if not (path.exists() and path.read_bytes() == wanted):
            if path.exists() and not over:
                raise DataError(f"{out} holds an unfinished set of another config: rm -r {out}")
            if path.exists():
                print("start over: the unfinished set here has another config")
            for file in out.iterdir():
                if file != work:
                    file.unlink()
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            write_whole(path, wanted)
    if config.stand_ins:
        write_stand_ins(Path(config.stand_ins))
    items, missing = list_inputs(config)
    for what in missing:
        print(f"read: MISSING of source {what}", flush=True)
    return work, items, missing


def _read(items: list[Input], config: Config, work: Path, part: range, workers: int) -> None:
    todo = [items[number] for number in part if not done(items[number], work)]
    sizes = [sum(item.stamp()[::2]) / 1e6 for item in todo]
    tasks = [(item, config, work) for item in todo]
    files = Counter(item.source for item in items)
    tokens = [config.sources[item.source].tokens / files[item.source] for item in todo]
    run_tasks("read", "MB", tasks, read_input, sizes, workers, budget=sum(tokens) / 1e6)
    forget()


def _planned(items: list[Input], config: Config, work: Path, allow_partial: bool) -> Plan:
    records = read_records_of(items, work)
    lines = [json.dumps(e, ensure_ascii=False) for record in records for e in record["quarantine"]]
    write_whole(work / "quarantine.jsonl", "".join(f"{line}\n" for line in lines).encode())
    check_records(records, config, work, allow_partial)
    return _current_plan(items, work) or make_plan(items, records, config, work)


def _current_plan(items: list[Input], work: Path) -> Plan | None:
    """The plan, unless an input was read again since."""
    plan = read_plan(work)
    if plan is None or len(plan.stems) != len(items):
        return None
    if not all(done(item, work) for item in items):
        return None
    digests = [record["sha256"] for record in read_records_of(items, work)]
    return plan if plan.inputs_sha256 == digests else None


def _write(plan: Plan, config: Config, work: Path, out: Path, part: range, workers: int) -> None:
    todo = [number for number in part if not written(number, plan, work)]
    if skipped := len(part) - len(todo):
        print(f"continue: {skipped} shards are done", flush=True)
    tasks = [(number, plan, config, work, out) for number in todo]
    sizes = [config.shard_tokens / 1e6] * len(todo)
    run_tasks("shards", "Mtok", tasks, write_one, sizes, workers)


def _finished(config: Config, out: Path) -> Manifest:
    manifest = shards.read_manifest(out)
    if manifest.config != config.as_dict():
        different = [
            key for key, value in config.as_dict().items() if manifest.config.get(key) != value
        ]
        raise DataError(
            f"{out} holds a set made with another {', '.join(different)}; give another --out, or "
            f"remove it: rm -r {out}"
        )
    for shard in manifest.shards:
        shards.check_sizes(out, manifest, shard)
    shutil.rmtree(out / ".progress", ignore_errors=True)  # killed right behind the manifest
    print(f"{out} is finished already (verify it: python -m data.verify {out})")
    return manifest


@contextlib.contextmanager
def _reserved(out: Path, alone: bool = True) -> Iterator[None]:
    """Make the directory ours: new, unfinished or finished, and for one process or for tasks."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; give a new directory as --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        space_left_or_say(error, out.parent)
        raise
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"another data.prepare is writing {out}; wait for it") from None
    else:
        known = (out / "manifest.json").exists() or (out / ".progress").exists()
        if not known and any(out.iterdir()):
            raise DataError(f"{out} holds other files; give a new directory as --out")
        yield
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main())
