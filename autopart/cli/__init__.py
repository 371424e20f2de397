"""The command line. Results go to stdout, progress and errors to stderr; docs/cli.md lists options and exit statuses.

torch and the solver are imported inside the commands: `autopart --help` answers at once.
"""

from autopart.cli.entry import main

__all__ = ["main"]
