"""Compute once what equal stages compute from equal channels.  [exact]"""

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite
from compiled_adv.stage import Stage


def same(pipeline: Pipeline, node: Node) -> Rewrite | None:
    """Equal stages that read the same versions: the later one's readers turn to the first."""
    first = next(other for other in pipeline.nodes if other.stage == node.stage and other.reads == node.reads)
    if first is node or node.stage.opaque:
        return None
    return Rewrite((node,), (), tuple(zip(node.produced, first.produced, strict=True)))


share = Pass(
    "share",
    why="both norm blocks find the groups of rows; with one group size that is one stage",
    rules=((P(Stage), same),),
)
