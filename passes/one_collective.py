"""Merge all batch moments that are due at one point.  [exact]"""

import networkx as nx

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, fuse
from compiled_adv.stages.statistics import BatchMoments


def together(pipeline: Pipeline, node: Node) -> Rewrite | None:
    """Moments that do not wait for each other are one node: ranks will meet there once."""
    waits = nx.ancestors(pipeline.graph, node.name) | nx.descendants(pipeline.graph, node.name)
    others = [n for n in pipeline.nodes if isinstance(n.stage, BatchMoments) and n is not node and n.name not in waits]
    return fuse(pipeline, node, others[0]) if others else None


one_collective = Pass(
    "one_collective",
    why="no time on one process: across ranks, one collective for all batch moments due at one point",
    rules=((P(BatchMoments), together),),
)
