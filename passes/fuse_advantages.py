"""Normalising the advantages and shaping them by process rewards as one node.  [exact]"""

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, fuse, readers
from compiled_adv.stages.adv_norm import AdvNorm
from compiled_adv.stages.process_adv_shaping import GVPO, Additive, ProcessWeighted


def with_shaping(pipeline: Pipeline, norm: Node, shaping: Node) -> Rewrite | str:
    """The normalised advantages have no other reader, so they are never written."""
    others = [node.name for node in readers(pipeline, norm.writes[0]) if node is not shaping]
    if others:
        return f"{', '.join(others)} reads the normalised advantages too"
    return fuse(pipeline, norm, shaping)


fuse_advantages = Pass(
    "fuse_advantages",
    why="the advantages are read once for their moments and once to be written",
    rules=tuple((P(AdvNorm) >> P(shaping), with_shaping) for shaping in (Additive, GVPO, ProcessWeighted)),
)
