"""Takes a path or a recipe's name; gives the file's content and the line of each of its keys."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from compiled_adv.errors import ConfigError, ConfigNotFound, InvalidValue, suggest
from compiled_adv.files import unique_keys

MAX_BYTES = 1_000_000
MAX_NODES = 100_000  # aliases counted as often as they are used, so that a small file cannot stand for a huge one
MAX_DEPTH = 64


class _Loader(yaml.SafeLoader):
    """Safe YAML whose floats follow YAML 1.2: `1e-5` is a number, which 1.1 reads as a string."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Open a bracket; scanning costs the square of how many are open."""
        super().fetch_flow_collection_start(token)
        if self.flow_level > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} brackets within each other")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def recipes() -> dict[str, Path]:
    """The shipped recipes by name: beside this file in an installed package, beside the package in a checkout."""
    here = Path(__file__).parent
    folder = next((x for x in (here / "configs", here.parent / "configs") if (x / "default.yaml").is_file()), here)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def bucket_files() -> dict[str, Path]:
    """The shipped bucket boundaries by name."""
    folder = recipes()["default"].parent / "buckets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(config: str | os.PathLike[str], known: dict[str, Path] | None = None) -> Path:
    """The file that a path or a shipped name means; `known`: the shipped ones, recipes if left out."""
    known = recipes() if known is None else known
    if isinstance(config, str) and config in known:
        return known[config]
    path = Path(config)
    try:
        found = path.is_file()
    except OSError:  # a name longer than a file's may be
        found = False
    if not found:
        raise ConfigNotFound("neither a file nor a shipped recipe", found=str(config), hint=suggest(path.stem, known))
    return path


def read(path: Path) -> tuple[Any, dict[str, int]]:
    """The content of a YAML or JSON file, and the line of each dotted key (YAML only). A key twice is an error."""

    def twice(key: str) -> ConfigError:
        return InvalidValue(f"the key '{key}' is given twice", at=path.name)

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigNotFound(f"cannot read {path}", found=error.strerror) from error
    if len(raw) > MAX_BYTES:
        raise InvalidValue(f"a configuration file has at most {MAX_BYTES} bytes", at=path.name)
    try:
        if path.suffix == ".json":
            return json.loads(raw, object_pairs_hook=lambda pairs: unique_keys(pairs, twice)), {}
        return _read_yaml(raw, path)
    except ConfigError:
        raise
    except RecursionError as error:
        raise InvalidValue(f"{path.name} is nested too deeply", at=str(path)) from error
    except Exception as error:  # the parsers let through what Python's own conversions raise
        raise InvalidValue(f"{path.name} cannot be parsed", at=str(path), found=error) from error


def _read_yaml(raw: bytes, path: Path) -> tuple[Any, dict[str, int]]:
    loader = _Loader(raw)
    try:
        root = loader.get_single_node()
        lines: dict[str, int] = {}
        if root is None:
            return None, lines
        _walk(root, (), lines, path)
        return loader.construct_document(root), lines
    finally:
        loader.dispose()


def _walk(root: yaml.Node, start: tuple[str, ...], lines: dict[str, int], path: Path) -> None:
    """Note the line of each key; refuse a key given twice, and a file that aliases blow up or that never ends."""
    todo, seen = [(root, start)], 0
    while todo:
        node, keys = todo.pop()
        seen += 1
        if seen > MAX_NODES or len(keys) > MAX_DEPTH:
            raise InvalidValue(f"{path.name} is too large once its aliases are followed", at=str(path))
        if isinstance(node, yaml.SequenceNode):
            todo += [(item, (*keys, str(i))) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else "?"
                line = key.start_mark.line + 1
                if name in names:
                    raise InvalidValue(f"the key '{name}' is given twice", at=f"{path.name}:{line}")
                names.add(name)
                lines[".".join((*keys, name))] = line
                todo.append((value, (*keys, name)))
