"""Merge all batch moments that are due at one point.  [exact]"""

import networkx as nx

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, fuse
from compiled_adv.stages.statistics import BatchMoments


def together(pipeline: Pipeline, node: Node) -> Rewrite | str | None:
    """Moments that do not wait for each other are one node: ranks will meet there once."""
    moments = [other for other in pipeline.nodes if isinstance(other.stage, BatchMoments)]
    lot = [node]
    for other in moments:
        if not any(other is one or _waits(pipeline, other, one) or _waits(pipeline, one, other) for one in lot):
            lot.append(other)
    if len(lot) > 1:
        return fuse(pipeline, *lot)
    earlier = [other.name for other in moments if _waits(pipeline, node, other)]
    return f"it waits for {', '.join(earlier)}" if earlier else None


def _waits(pipeline: Pipeline, node: Node, other: Node) -> bool:
    return node is not other and nx.has_path(pipeline.graph, other.name, node.name)


one_collective = Pass(
    "one_collective",
    why="no time on one process: across ranks, one collective for all batch moments due at one point",
    rules=((P(BatchMoments), together),),
)
