"""How a command line begins and ends: every failure becomes one line, a hint and an exit status."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import typer
from typer.exceptions import TyperException

from autopart.cli import calibrate, compare_run, devices, partition, profile, simulate, verify, zoo  # noqa: F401  (their commands)
from autopart.cli.options import app
from autopart.cli.output import debugging, show
from autopart.errors import (
    AutopartError,
    CaptureError,
    InfeasibleError,
    InputFileError,
    LimitError,
    UsageError,
    VerificationError,
)

CODES: dict[type[AutopartError], str] = {
    UsageError: "usage",
    InfeasibleError: "infeasible",
    LimitError: "limit",
    VerificationError: "verification",
    CaptureError: "capture",
    InputFileError: "input_file",
}
INTERNAL_STATUS, INTERRUPTED_STATUS, TERMINATED_STATUS = 1, 130, 143


class _Terminated(BaseException):
    """SIGTERM arrived; raised so that child processes and files are cleaned up on the way out."""


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; nothing but a fault of the interpreter escapes as an exception."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments and arguments[:2] != ["zoo", "run"]
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _on_terminate)
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="autopart", standalone_mode=False)
        if result == INTERRUPTED_STATUS:  # what typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # no arguments at all: the help
            show(message)
            return UsageError.exit_status
        context = getattr(error, "ctx", None)
        hint = f"See: {context.command_path} --help" if context is not None else None
        return _fail("usage", message, hint, UsageError.exit_status, as_json)
    except AutopartError as error:
        _traceback()
        code = next((CODES[base] for base in type(error).__mro__ if base in CODES), "internal")
        return _fail(code, error.message, error.hint, error.exit_status, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", "interrupted", None, INTERRUPTED_STATUS, as_json)
    except _Terminated:
        return _fail("terminated", "terminated", None, TERMINATED_STATUS, as_json)
    except Exception as error:
        _traceback()
        message = f"this is a fault of autopart, not of your model: {type(error).__name__}: {error}"
        hint = "Please report it to the project with the command you ran; AUTOPART_DEBUG=1 shows the traceback."
        return _fail("internal", message, hint, INTERNAL_STATUS, as_json)


def _fail(code: str, message: str, hint: str | None, status: int, as_json: bool) -> int:
    from autopart.text import printable

    print(printable(f"error: {message}" + (f"\n{hint}" if hint else "")), file=sys.stderr)
    if as_json:
        show(json.dumps({"error": {"code": code, "message": message, "hint": hint}}, indent=1))
    return status


def _traceback() -> None:
    if debugging():
        traceback.print_exc()
