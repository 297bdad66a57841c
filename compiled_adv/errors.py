"""Takes the facts of a mistake; gives one exception class per mistake: what, where, what was found, what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CompiledAdvError(ValueError):
    """Every error of ours. Only the lines that are given are printed."""

    def __init__(self, what: str, *, at: str | None = None, found: object = None, hint: str | None = None) -> None:
        self.what, self.at, self.found, self.hint = what, at, found, hint
        lines = [f"{type(self).__name__}: {_short(what)}"]
        for label, text in (("at", at), ("found", found), ("try", hint)):
            if text is not None:
                lines.append(f"  {label:<5} {_short(text)}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments do not survive the default pickling; workers send errors to their driver.
        return _rebuild, (type(self), self.what, self.at, self.found, self.hint)


def _rebuild(cls: type[CompiledAdvError], what: str, at: str | None, found: object, hint: str | None) -> object:
    return cls(what, at=at, found=found, hint=hint)


class AdvantageWarning(UserWarning):
    """A rule of the default computation that may harm training touched this batch; issued once per name."""


# ---- the configuration ----


class ConfigError(CompiledAdvError):
    """The configuration alone shows the mistake."""


class UnknownKey(ConfigError):
    """A key that nothing reads."""


class UnknownName(ConfigError):
    """A name (mode, level, unit, kind, implementation) that is not one of the known ones."""


class InvalidValue(ConfigError):
    """A value of the wrong type or out of its range."""


class ConflictingSettings(ConfigError):
    """Two settings that exclude each other."""


class ConfigNotFound(ConfigError):
    """Neither a readable configuration file nor the name of a shipped recipe."""


class PluginNotFound(ConfigError):
    """A dotted path that leads to no function."""


class BadKwargs(ConfigError):
    """Keyword arguments that JSON cannot carry or the function does not take."""


# ---- one call's input ----


class BatchError(CompiledAdvError):
    """The batch, its metadata or a per-call value is wrong; refused before any work."""


class EmptyBatch(BatchError):
    """No rows or no columns."""


class MissingKey(BatchError):
    """A tensor that this configuration reads is not in the batch."""


class WrongType(BatchError):
    """Not a tensor, mapping or object of the expected kind."""


class WrongShape(BatchError):
    """A tensor of another shape."""


class WrongDtype(BatchError):
    """A tensor of another dtype."""


class WrongDevice(BatchError):
    """A tensor on another device than the rest of the batch."""


class BadMeta(BatchError):
    """Group sizes, row counts or references that do not fit the batch."""


class BadMask(BatchError):
    """An attention_mask that is no prefix, or a loss_mask outside it."""


class BadTurnIds(BatchError):
    """Turn ids of active tokens that are out of range or go back."""


class NonFinite(BatchError):
    """NaN or infinity in a slot that counts."""


class OutOfRange(BatchError):
    """A finite number outside the range its stage needs."""


class RowsDiffer(BatchError):
    """Rows that must agree (of one logical rollout, of one turn) do not."""


class MissingReferences(BatchError):
    """Custom shaping returned no shaped reference where reward normalisation needs them."""


class CallError(BatchError):
    """A per-call value that is unknown or out of range."""


# ---- a user's function ----


class PluginError(CompiledAdvError):
    """A user's function broke its contract."""


class PluginResult(PluginError):
    """It returned the wrong type, fields, shape, dtype, device, or a non-finite number."""


class PluginWroteInput(PluginError):
    """It wrote to its inputs."""


class PluginRaised(PluginError):
    """It raised; its own error is chained."""


class PadUnsafe(PluginError):
    """It was declared pad-safe, and padding changes its result."""


# ---- files ----


class FileError(CompiledAdvError):
    """A file cannot be read or written."""


class RolloutFile(FileError):
    """A rollout file that is corrupt or not of the documented form."""


class OutputExists(FileError):
    """The output folder is not empty."""


class OutputFailed(FileError):
    """An output file could not be written whole."""


class ExtraMissing(FileError):
    """A library that an optional part needs is not installed."""


class ResultsFile(FileError):
    """Benchmark results that are empty, cut short or not of the documented form."""


class MachinesDiffer(FileError):
    """Benchmark results of two machines, which cannot be compared."""


class BenchmarkMissing(FileError):
    """A benchmark that only one side of a comparison has."""


class LengthsFile(FileError):
    """Lengths that are no lengths: no list, empty, or a length below 1."""


# ---- trainers ----


class UnsupportedTrainer(CompiledAdvError):
    """A trainer whose functions are not those that an integration knows; it is left as it was."""


# ---- the graph of stages ----


class GraphError(CompiledAdvError):
    """The stages do not form a legal graph."""


class MissingChannel(GraphError):
    """A stage reads a channel that nothing writes."""


class DoubleWrite(GraphError):
    """Two stages write the same channel version."""


class Cycle(GraphError):
    """Stages wait for each other."""


class UnusedStage(GraphError):
    """A stage whose output nothing reads."""


# ---- compiling ----


class PluginSplits(CompiledAdvError):
    """A user's function that cannot be a part of the compiled Program, where the configuration requires that."""


class NoBucket(BatchError):
    """A batch above every bucket, where that is configured to be an error."""


class CompileFailed(CompiledAdvError):
    """torch.compile refused a stage, or its compiler failed."""


class CompilerMissing(CompiledAdvError):
    """No C++ compiler on this machine."""


class NotCapturable(CompiledAdvError):
    """CUDA graphs are asked for where none can be captured."""


class BuildFailed(CompiledAdvError):
    """The C++ compiler refused the operator."""


class Forked(CompiledAdvError):
    """A process forked after its parent computed with several threads: the next parallel loop would hang."""


class NotWarm(CompiledAdvError):
    """A shape or kind of batch without an executable, after warm-up was declared complete."""


class ResultsDiffer(CompiledAdvError):
    """The compiled result is not the eager one."""


# ---- ranks ----


class RankFailed(CompiledAdvError):
    """Another rank of the reduce group could not compute its part of the call; the message says which, and why."""


class RanksLost(CompiledAdvError):
    """A collective failed: a rank died, or did not come within the group's timeout."""


LONGEST = 600  # characters of one line of a message


def shown(value: object, most: int = 80) -> str:
    """A value as it is written in Python, cut short; by its type where it cannot be written."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, an object that fails
        text = f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(keys: Iterable[object]) -> str:
    """Keys of a mapping, which need not be strings."""
    return ", ".join(key if isinstance(key, str) else shown(key) for key in keys)


def _short(text: object) -> str:
    """Text for one line of a message: people read it, and every terminal can print it."""
    text = text if isinstance(text, str) else shown(text, LONGEST) if isinstance(text, int) else str(text)
    text = text.encode(errors="backslashreplace").decode()  # halves of a surrogate pair cannot be encoded
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant, or None."""
    by_lower = {each.lower(): each for each in known}
    written = name if isinstance(name, str) else shown(name)
    close = difflib.get_close_matches(written[:LONGEST].lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def suggest(name: object, known: Iterable[str]) -> str:
    """A hint line: the nearest known name first, then all of them."""
    known = [*known]
    near = nearest(name, known)
    listed = f"known: {', '.join(known)}"
    return f"{near}   ({listed})" if near else listed
