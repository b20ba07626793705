"""memplan from the command line: `python -m memplan clear-costs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from memplan.cache import cache_dir, forget


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Gives the exit status."""
    parser = argparse.ArgumentParser("memplan", description="Makes a PyTorch training step fit a byte budget.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "clear-costs", help="forget what was measured of ops and models, and the plans made of it; plans measure anew"
    )
    parser.parse_args(arguments)
    print(f"memplan: {forget()} files of measured costs and plans removed from {cache_dir()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
