"""Takes bytes and a path; gives a file that is there whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path

from compiled_adv.errors import OutputFailed

UNFINISHED = ".tmp"  # how the names of files end that are being written


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder. A reader, and a crash, find all of it or what was there before.

    Raises OutputFailed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _keep_names(path.parent)
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written", found=error) from error
    finally:
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
