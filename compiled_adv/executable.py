"""Takes a Program and an admitted batch; gives the computed outputs and the flags raised on rows.

The eager Executable runs every segment as it is, at the batch's own shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compiled_adv.admit import Admitted
from compiled_adv.pipeline import Node
from compiled_adv.program import Program, Segment, flag_name
from compiled_adv.status import merge, raise_errors


@dataclass(frozen=True)
class EagerExecutable:
    """The Program, uncompiled."""

    program: Program

    def run(self, admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """Outputs by name and flags by name with their rows. A segment's errors stop what follows it."""
        env = dict(admitted.channels)
        flags: dict[str, list[int]] = {}
        last_use = {v: i for i, segment in enumerate(self.program.segments) for v in segment.inputs}
        kept = {version for _, version in self.program.outputs}
        for i, segment in enumerate(self.program.segments):
            if isinstance(segment.module, Node):
                results = call_plugin(segment, admitted, env)
            else:
                *results, raised = segment.module(*(env[v] for v in segment.inputs))
                flags = merge(flags, read_flags(segment, raised))
                raise_errors(flags)
            env.update(zip(segment.outputs, results, strict=True))
            for version in [v for v in env if v not in kept and last_use.get(v, -1) <= i]:
                del env[version]
        return {name: env[version] for name, version in self.program.outputs}, flags


def call_plugin(segment: Segment, admitted: Admitted, env: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """A user's function on exact channels."""
    node = segment.module
    assert isinstance(node, Node)
    by_channel = {name.removesuffix("?"): version for name, version in zip(node.stage.reads, node.reads, strict=True)}

    def channel(name: str) -> Tensor | None:
        version = by_channel[name]
        return None if version is None else env[version]

    return node.stage.call(admitted, channel)  # type: ignore[attr-defined]


def read_flags(segment: Segment, raised: Tensor | None) -> dict[str, list[int]]:
    """Rows of each flag that a segment raised; one look at the host where none is."""
    if raised is None or not bool(raised.any()):
        return {}
    found: dict[str, list[int]] = {}
    for flag, rows_B in zip(segment.flags, raised, strict=True):
        rows = rows_B.nonzero().flatten().tolist()
        if rows:
            found = merge(found, {flag_name(flag): rows})
    return found


