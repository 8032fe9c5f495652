"""`dalsegno store`: what is in an embedded store, whether it is sound, and emptying it."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import lmdb
import typer

from dalsegno.errors import OptionError
from dalsegno.obs.progress import Progress
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.store.embedded.inspection import list_store, verify_store
from dalsegno.store.keys import salt_tag

__all__ = ["store_commands"]

store_commands = typer.Typer(help="Look into a store of prefixes, check it, empty it.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the store.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@store_commands.command("stats")
def _stats(directory: _Folder, *, as_json: _Json = False) -> None:
    """Print how full the store is, and what has happened to it."""
    with _opened(directory) as store:
        figures = store.stats()
    if as_json:
        typer.echo(json.dumps(figures))
        return
    names = (
        "objects",
        "used_bytes",
        "capacity_bytes",
        "reserved_bytes",
        "evicted_objects",
        "evicted_bytes",
        "moved_aside",
    )
    for name in names:
        typer.echo(f"{name:<16} {figures.get(name, 0):>16,}")


@store_commands.command("ls")
def _list(directory: _Folder, *, as_json: _Json = False) -> None:
    """Print one line for each object: bytes, tick of its last use, boundary, part, namespace, salt tag, hash."""
    with _opened(directory) as store:
        for entry in list_store(store):
            key = entry.key
            fields = {
                "bytes": entry.num_bytes,
                "tick": entry.tick,
                "boundary": key.boundary,
                "part": key.part,
                "namespace": key.namespace,
                "salt": key.salt,
                "hash": key.block_hash.hex(),
            }
            typer.echo(json.dumps(fields) if as_json else "  ".join(map(str, fields.values())))


@store_commands.command("verify")
def _verify(directory: _Folder, *, as_json: _Json = False) -> None:
    """Read every object and check it; exit status 1 if something is wrong."""
    with _opened(directory) as store:
        total = int(store.stats().get("objects", 0))
        with Progress("objects", total) as progress:

            def show(done: int) -> None:
                if progress.is_due():
                    progress.show(done)

            faults = verify_store(store, show)
    if as_json:
        typer.echo(json.dumps({"objects": total, "faults": faults}))
    else:
        for fault in faults:
            typer.echo(fault)
        typer.echo(f"{total} objects, {len(faults)} faults", err=True)
    if faults:
        raise typer.Exit(1)


@store_commands.command("clear")
def _clear(
    directory: _Folder,
    *,
    salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only what was stored under this cache salt.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Remove all objects, or those of one cache salt."""
    from dalsegno.cli.terminal import status

    with _opened(directory) as store, status("removing objects"):
        removed = store.clear(salt=None if salt is None else salt_tag(salt))
    typer.echo(json.dumps({"removed": removed}) if as_json else f"removed {removed} objects")


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(directory, create=False)
    try:
        yield store
    except lmdb.Error as error:
        raise OptionError(f"the store in {directory} is damaged: {error}") from error
    finally:
        store.close()
