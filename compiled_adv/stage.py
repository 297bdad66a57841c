"""Takes channels by name; gives Stage: the unit that reads some, writes others, and may raise flags on rows.

A Stage is a frozen dataclass: its annotated fields are its numbers, constants of the instance, and equal stages
compare equal. `forward` is torch code without in-place writes, host reads or Python branches on a tensor. Its
arguments come in the order of `reads` (None where an optional channel, marked `?`, is absent); it returns what
`writes` names, then one bool [B] tensor for each of `flags`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True)
class Stage:
    """One step of the computation. `slot` is the config key that it comes from."""

    slot: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[tuple[str, ...]] = ()
    mixes_rows: ClassVar[bool] = False  # what it gives for a row depends on other rows
    opaque: ClassVar[bool] = False  # it runs between two segments: a user's function on exact shapes, or a collective

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True)(cls)

    def forward(self, *channels: Any, **_: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def numbers(self) -> dict[str, Any]:
        """The instance's own numbers, by field name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.numbers().items())
        return f"{type(self).__name__}({inside})"
