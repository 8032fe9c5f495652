"""`dalsegno store`: what is in an embedded store, whether it is sound, emptying it; lending memory to Mooncake."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import lmdb
import typer

from dalsegno.errors import OptionError
from dalsegno.obs.progress import Progress
from dalsegno.store.base import Store
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.store.embedded.inspection import list_store, verify_store
from dalsegno.store.keys import salt_tag
from dalsegno.store.registry import is_mooncake

__all__ = ["store_commands"]

store_commands = typer.Typer(
    help="Look into a store of prefixes, check it, empty it; lend memory to Mooncake.", no_args_is_help=True
)

_Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the store.")]
_Address = Annotated[str, typer.Argument(metavar="mooncake://HOST:PORT", help="Where the master listens.")]
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
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder of the store, or mooncake://HOST:PORT.")],
    *,
    salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only what was stored under this cache salt.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Remove all objects, or those of one cache salt."""
    from dalsegno.cli.terminal import status

    opened = _mooncake(directory) if is_mooncake(directory) else _opened(directory)
    with opened as store, status("removing objects"):
        removed = store.clear(salt=None if salt is None else salt_tag(salt))
    typer.echo(json.dumps({"removed": removed}) if as_json else f"removed {removed} objects")


@store_commands.command("serve")
def _serve(
    address: _Address,
    *,
    segment_bytes: Annotated[str, typer.Option(metavar="N", help="How much to lend: bytes, or such as 4GB.")],
    with_master: Annotated[
        bool, typer.Option("--with-master", help="Start a master on this host too, and end it with this command.")
    ] = False,
) -> None:
    """Lend memory to a Mooncake store until stopped by Ctrl-C or SIGTERM."""
    from dalsegno.cli.store_serve import serve_memory

    serve_memory(address, segment_bytes, with_master=with_master)


@contextlib.contextmanager
def _mooncake(address: str) -> Iterator[Store]:
    from dalsegno.store.mooncake import open_mooncake
    from dalsegno.store.mooncake.config import master_address

    store = open_mooncake({"master_server_address": master_address(address), "global_segment_size": 0})
    with contextlib.closing(store):
        yield store


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[EmbeddedStore]:
    if is_mooncake(directory):
        raise OptionError(
            f"this looks into folders, got {directory!r}; of a Mooncake store the master tells, at /metrics of its "
            "metrics port"
        )
    store = EmbeddedStore(Path(directory), create=False)
    try:
        yield store
    except lmdb.Error as error:
        raise OptionError(f"the store in {directory} is damaged: {error}") from error
    finally:
        store.close()
