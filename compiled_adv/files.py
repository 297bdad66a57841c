"""Takes bytes and paths; gives files that are there whole or not at all, and what a file of JSON says."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_adv.errors import FileError, OutputFailed, shown

UNFINISHED = ".tmp"  # how the names of files end that are being written


def check_outputs(outputs: Sequence[Path], inputs: Iterable[Path] = ()) -> None:
    """Refuse, before any work, files that cannot be written or that would spoil an input or each other."""
    taken = {_real(path): f"{path} is an input" for path in inputs}
    for path in outputs:
        try:
            if not path.name or path.is_dir():
                raise OutputFailed(f"{path} is a folder", hint="the name of a file")
            above = next(each for each in path.absolute().parents if each.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                raise OutputFailed(f"{path} cannot be written", found=f"no folder to write to: {above}")
            real = _real(path)
        except OutputFailed:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in a name
            raise OutputFailed(f"{path} cannot be written", found=error) from error
        if why := taken.get(real):
            raise OutputFailed(why, hint="another name")
        taken[real] = f"{path} is to be written twice"


def _real(path: Path) -> str:
    return os.path.realpath(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder. A reader, and a crash, find all of it or what was there before.

    Raises OutputFailed."""
    write_together({path: content})


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files as `write_whole` does, none before all of them are safe on the disk beside their places."""
    check_outputs([*files])
    temporaries: dict[Path, Path] = {}
    path = Path()
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporaries[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
            with open(temporaries[path], "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
        for folder in {path.parent for path in files}:
            _keep_names(folder)
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written", found=error) from error
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):  # gone after a success
                temporary.unlink()


def _keep_names(folder: Path) -> None:
    """What was renamed in a folder stays so, whatever happens to the machine."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unique_keys(pairs: Sequence[tuple[str, Any]], twice: Callable[[str], Exception]) -> dict[str, Any]:
    """An object of JSON, for `object_pairs_hook`; raises twice(key) for a key that it gives twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise twice(next(name for name in names if names.count(name) > 1))
    return content


def read_json(path: Path, most: int, mistake: type[FileError], hint: str) -> Any:
    """The content of a JSON file of at most so many bytes; `mistake` where it has none, or a key twice."""

    def twice(key: str) -> FileError:
        return mistake(f"{path} holds a key twice in one object", found=shown(key))

    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)  # a device may have no end
    except OSError as error:
        raise mistake(f"{path} cannot be read", found=error.strerror) from error
    if len(raw) > most:
        raise mistake(f"{path} is larger than {most:,} bytes")
    if not raw.strip():
        raise mistake(f"{path} is empty, so no JSON", hint=hint)
    try:
        return json.loads(raw, object_pairs_hook=lambda pairs: unique_keys(pairs, twice))
    except mistake:
        raise
    except (ValueError, RecursionError) as error:
        raise mistake(f"{path} is no JSON: it may have been cut short", found=error, hint=hint) from error
