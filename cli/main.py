"""The command `gdn`: finds the subcommand, and turns what ends it into an exit code.

0 all right, 1 a check failed, 2 usage (which a refused argument of the library is too), 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

import gdn
from gdn.cli.files import discard
from gdn.cli.names import suggestion

#: Subcommands with their line in the help. Each is the function of its name in the module of its name, which is
#: imported when it is called for, so that `gdn --help` need not wait for NumPy.
_COMMANDS = {
    "verify": "Check every backend of this machine against the oracle.",
    "soak": "Run a speculative decode loop for very long.",
    "bench": "Time every op against what this machine's memory could do.",
    "compile": "Compile kernels ahead of time, for this machine or for others.",
    "info": "Show versions, GPUs, backends, caches and limits.",
}
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Refused(click.ClickException):
    """An argument that the library does not take: one line, as for every other mistake in the usage."""

    exit_code = 2


class _Commands(click.Group):
    """The subcommands, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"gdn.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"unknown command {name!r}; {suggestion(name, _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **keywords: Any) -> click.Context:
        with _output_may_fail():  # --help and --version print here
            return super().make_context(*args, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _output_may_fail():
                return super().invoke(ctx)
        except gdn.GdnError as error:
            raise _Refused(str(error).partition("\n")[0]) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(_INTERRUPTED)


@contextmanager
def _output_may_fail() -> Iterator[None]:
    """A pipe that nobody reads on ends a command quietly, a full disk behind a stream with one line."""
    try:
        yield
    except BrokenPipeError:
        discard(sys.stdout)
        discard(sys.stderr)
        raise click.exceptions.Exit(_BROKEN_PIPE) from None
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        discard(sys.stdout)
        raise click.ClickException(f"cannot write the output: {error.strerror}") from error


@click.group(cls=_Commands, name="gdn", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gdn.__version__, prog_name="gdn")
def main() -> None:
    """Gated DeltaNet recurrence kernels for CuPy and NumPy: is what runs on this machine right?

    Exit codes: 0 all right, 1 a check failed, 2 usage, 130 after Ctrl-C or SIGTERM. Results go to standard output,
    progress to standard error. With --json standard output is JSON, whatever was found and however far the run came;
    it is empty where no run began.
    """
    context = click.get_current_context()
    if threading.current_thread() is threading.main_thread():  # others may not set signals
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps what is finished, too
        context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
