"""Prints the table of all formats, and exits with 1 if a call is invalid or a cut shows."""

import argparse
import sys

import transformers

from quire import LocalRedis
from tests.tools.formats import FORMATS
from tests.tools.run import Score, score_of

COLUMNS = (
    "generations",
    "short",
    "calling",
    "calls",
    "valid",
    "cuts",
    "equal",
    "controls",
    "caught",
)


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=200, help="of each format")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--format", action="append", choices=FORMATS, help="default: all")
    given = parser.parse_args()
    transformers.logging.disable_progress_bar()
    seeds = range(given.first_seed, given.first_seed + given.generations)
    rows: dict[str, Score] = {}
    width = max(map(len, FORMATS))
    print("format".ljust(width), *COLUMNS, sep="  ")
    with LocalRedis.start() as redis:
        for number, name in enumerate(given.format or FORMATS):
            row = score_of(FORMATS[name], seeds, redis_url=redis.url, queue=f"tools{number}")
            rows[name] = row
            cells = [str(getattr(row, column)).rjust(len(column)) for column in COLUMNS]
            print(name.ljust(width), *cells, "" if row.is_good else "WRONG", sep="  ", flush=True)
            if row.fault:
                print("   ", row.fault, flush=True)
    return int(not all(row.is_good for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
