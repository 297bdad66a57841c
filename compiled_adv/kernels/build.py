"""Takes operator.cpp; gives the path of its shared library, built once for this source, compiler and processor.

A library's name holds the key of what it was built from and the digest of its own bytes, so a damaged file is never
loaded. It appears under its name complete or not at all: processes that build at once do not disturb each other.
"""

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from compiled_adv.errors import BuildFailed, CompilerMissing

SOURCE = Path(__file__).with_name("operator.cpp")
# No contraction to fused multiply-add: a result is the same number on every machine.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w")


def library(folder: str | os.PathLike[str] | None = None) -> Path:
    """The built library, from `folder` (by default the user's cache) if it is there and whole.

    Where that folder cannot be written, it is built for this process alone.
    """
    compiler = _compiler()
    folder = Path(folder) if folder is not None else default_folder()
    key = _key(compiler)
    try:
        return _found(folder, key) or _build(compiler, folder, key)
    except OSError as error:
        warnings.warn(f"the operator is built anew: {folder} cannot be used ({error})", RuntimeWarning, stacklevel=2)
    try:
        own = tempfile.mkdtemp(prefix="compiled_adv-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return _build(compiler, Path(own), key)
    except OSError as error:
        hint = "space in the folder for temporary files, or COMPILED_ADV_CACHE=a folder that can be written"
        raise BuildFailed("the operator cannot be written anywhere", found=error, hint=hint) from error


def _found(folder: Path, key: str) -> Path | None:
    """A whole library of this key; a damaged one is removed."""
    for path in sorted(folder.glob(f"operator-{key}-*.so")):
        if path.stem.endswith(_digest(path.read_bytes())):
            return path
        path.unlink(missing_ok=True)
    return None


def default_folder() -> Path:
    """COMPILED_ADV_CACHE, else compiled_adv/ in the user's cache directory."""
    if given := os.environ.get("COMPILED_ADV_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compiled_adv"


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise CompilerMissing(
        "no C++ compiler for the compiled backend's operator",
        found="none of " + ", ".join(names) + " on PATH",
        hint="install g++, name a compiler in CXX, or set actor.advantage.backend: eager",
    )


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = (SOURCE.read_text(), " ".join(FLAGS), version, _processor())
    return _digest("\0".join(parts).encode())


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    marks = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split(":")[0].strip() in marks))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _build(compiler: str, folder: Path, key: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "operator.so"
        run = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        if run.returncode != 0:
            raise BuildFailed(
                "the compiled backend's operator does not compile",
                at=str(SOURCE),
                found=(run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[0],
                hint=f"a C++17 compiler with GNU vector extensions instead of {compiler}, or backend: eager",
            )
        path = folder / f"operator-{key}-{_digest(made.read_bytes())}.so"
        os.replace(made, path)
    return path
