"""``python -m data.merge CONFIG.toml --out DIR``: end a stage whose tasks ran on a cluster.

After the reading tasks: duplicates out, tokenizer, and the list of shards. After the shards' tasks:
the manifest. It says which task is lacking.
"""

import argparse
import sys
from pathlib import Path

from data.errors import DataError
from data.prepare import merge


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.merge", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--allow-partial", action="store_true", help="accept files that broke off")
    options = parser.parse_args(arguments)
    try:
        merge(options.config, options.out, allow_partial=options.allow_partial)
    except DataError as error:
        print(f"data.merge: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
