"""Rows of benchmark results, printed as a table or as JSON lines."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Row", "command_line", "parse_arguments", "print_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside what it is measured against; `ratio` is value / reference."""

    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    command: str


def command_line() -> str:
    """How this benchmark was called, without the machine's paths."""
    script = "benchmarks/" + sys.argv[0].rsplit("/", 1)[-1]
    return " ".join(["python", script, *sys.argv[1:]])


def parse_arguments(description: str, *options: tuple[str, int]) -> argparse.Namespace:
    """Parse `--json` and integer options given as (name, default)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    for name, default in options:
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the rows on stdout."""
    for row in rows:
        if as_json:
            print(json.dumps(asdict(row)))
            continue
        beside = "" if row.reference is None else f"   beside {row.reference:.4g} {row.unit}, ratio {row.ratio:.3f}"
        print(f"{row.name:<48} {row.value:>10.4g} {row.unit}{beside}")
