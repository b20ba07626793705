"""memplan from the command line: `memplan` and `python -m memplan`."""

from memplan.command_line.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
