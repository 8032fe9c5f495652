"""The command `dalsegno`: what it offers, and how errors end it.

Answers and tables go to stdout, everything else to stderr. A user's mistake is one line and exit status 2. Everything
heavy is imported by the command that needs it, so that help is quick.
"""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dalsegno import __version__
from dalsegno.cli.flags import with_engine_flags, with_sampling_flags
from dalsegno.cli.store import store_commands
from dalsegno.errors import EngineError, UserError
from dalsegno.obs.log import log_to_stderr

__all__ = ["app"]

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a hub id such as owner/name.")]


# A command line that cannot be parsed; typer shows only this subclass of it.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(typer.core.TyperGroup):
    """Turns mistyped command lines and the errors we raise on purpose into one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            path = (error.ctx or ctx).command_path
            typer.echo(f"{path}: error: {error.format_message()} (see {path} --help)", err=True)
            raise typer.Exit(2) from error
        except UserError as error:
            typer.echo(f"dalsegno: error: {error}", err=True)
            raise typer.Exit(2) from error
        except EngineError as error:
            typer.echo(f"dalsegno: engine error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="dalsegno",
    cls=_Commands,
    help="A serving engine and KV-cache layer for hybrid language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.add_typer(store_commands, name="store")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dalsegno {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Log warnings only; the start-up plan is not shown.")
    ] = False,
) -> None:
    del version
    log_to_stderr(logging.WARNING if quiet else logging.INFO)


@app.command()
@with_engine_flags
@with_sampling_flags
def generate(
    model: _Model,
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; may be given several times.")
    ],
    *,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt instead.")] = False,
    sampling_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Answer prompts, streaming to the terminal."""
    from dalsegno.cli.generate import run_generate

    run_generate(model, prompt, sampling_options, engine_options, json_lines=json_lines)


@app.command(short_help="Talk to a model in a terminal.")
@with_engine_flags
@with_sampling_flags
def chat(
    model: _Model,
    *,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    sampling_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Talk to a model; /reset starts over, /quit ends, Ctrl-C stops an answer."""
    from dalsegno.cli.chat import run_chat

    run_chat(model, sampling_options, engine_options, system=system)


@app.command()
def make_tiny_model(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Such as qwen3-next; a wrong one lists all.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, or one with a tiny model.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a small random checkpoint, for trying things out."""
    from dalsegno.cli.terminal import status

    with status(f"making a tiny {kind} model"):
        from dalsegno.models.tiny import make_tiny_model as make

        make(kind, directory, seed)
    typer.echo(f"wrote a tiny {kind} model to {directory}", err=True)


@app.command(short_help="Play a conversation, caching off and on.")
def demo(
    session: Annotated[int, typer.Option(min=0, help="Which recorded conversation, under DALSEGNO_TRACES.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 16,
) -> None:
    """Play a conversation on a tiny model, caching off and on; fails if an answer differs."""
    from dalsegno.cli.demo import run_demo

    log_to_stderr(logging.WARNING)
    raise typer.Exit(run_demo(session=session, max_tokens=max_tokens))
