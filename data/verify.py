"""``python -m data.verify DIR``: read every byte of a set and check it against its manifest."""

import argparse
import sys
import time
from pathlib import Path

from data.errors import DataError
from data.shards import verify


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.verify", description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        manifest = verify(options.directory)
    except DataError as error:
        print(f"data.verify: {error}", file=sys.stderr)
        return 2
    size = sum(shard.bytes for shard in manifest.shards)
    seconds = time.perf_counter() - began
    print(
        f"{options.directory} is sound: {len(manifest.shards)} shards, {size / 1e6:.1f} MB in "
        f"{seconds:.2f} s; sha256 {manifest.sha256}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
