"""memplan from the command line: `python -m memplan clear-costs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from memplan.cache import cache_dir
from memplan.costs.known_costs import clear_costs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Gives the exit status."""
    parser = argparse.ArgumentParser("memplan", description="Makes a PyTorch training step fit a byte budget.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "clear-costs", help="forget the seconds and bytes that were measured of ops; plans measure anew"
    )
    parser.parse_args(arguments)
    print(f"memplan: {clear_costs()} files of measured costs removed from {cache_dir()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
