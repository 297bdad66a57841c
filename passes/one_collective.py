"""Merge the collectives of all batch moments that are due at one point.  [exact]"""

import networkx as nx

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite
from compiled_adv.stages.statistics import AcrossRanks


def together(pipeline: Pipeline, node: Node) -> Rewrite | str | None:
    """Collectives that do not wait for each other are one: ranks meet there once."""
    collectives = [other for other in pipeline.nodes if isinstance(other.stage, AcrossRanks)]
    lot = [node]
    for other in collectives:
        if not any(other is one or _waits(pipeline, other, one) or _waits(pipeline, one, other) for one in lot):
            lot.append(other)
    if len(lot) > 1:
        blocks = sum((other.stage.blocks for other in lot if isinstance(other.stage, AcrossRanks)), ())
        reads, writes = sum((other.reads for other in lot), ()), sum((other.writes for other in lot), ())
        return Rewrite(tuple(lot), (Node("+".join(n.name for n in lot), AcrossRanks(blocks), reads, writes),))
    earlier = [other.name for other in collectives if _waits(pipeline, node, other)]
    return f"it waits for {', '.join(earlier)}" if earlier else None


def _waits(pipeline: Pipeline, node: Node, other: Node) -> bool:
    return node is not other and nx.has_path(pipeline.graph, other.name, node.name)


one_collective = Pass(
    "one_collective",
    why="no time on one process: across ranks, one collective for all batch moments due at one point",
    rules=((P(AcrossRanks), together),),
)
