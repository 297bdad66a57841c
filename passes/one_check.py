"""Read every check of a batch in one pass instead of one pass each.  [exact]

Checks are summed before their one reduction over tokens, in two lots: those of channels that are read before the
recurrence, and those of channels (values, process rewards, the result) that are read behind it anyway. Which check
failed is then no longer known: the compiled path only says `invalid`, and the eager path, which runs in that case,
names it. Before a user's function every check runs first, so there is one lot.
"""

import networkx as nx

from compiled_adv.channel import base
from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import INVALID, P, Pass, Rewrite
from compiled_adv.stages.checks import Check, FirstToken, OneCheck
from compiled_adv.stages.estimator import BootstrapValues, OutcomeEverywhere, TokenGAE, TurnGAE

PER_ROW = (BootstrapValues, FirstToken)  # they read one column
ESTIMATORS = (TokenGAE, TurnGAE, OutcomeEverywhere)


def gather(pipeline: Pipeline, first: Node) -> Rewrite | None:
    """The checks that can be read where `first` is, if there are several."""
    late = _late(pipeline)
    lot = [
        (node, node.stage)
        for node in pipeline.nodes
        if isinstance(node.stage, Check) and (node.name in late) == (first.name in late)
    ]
    if len(lot) < 2 or first is not lot[0][0]:
        return None
    reads = tuple(dict.fromkeys(v for node, _ in lot for v in node.reads if v is not None))
    at = tuple((check, tuple(-1 if v is None else reads.index(v) for v in node.reads)) for node, check in lot)
    nodes, name = tuple(node for node, _ in lot), f"OneCheck.{first.name}"
    if first.name in late:
        return Rewrite(nodes, (Node(name, OneCheck(at, False), reads, (), (f"{INVALID}.late",)),))
    held = next((v for node in pipeline.nodes for v in node.reads if v and base(v) == "gae_lambda"), None)
    if held is None or any(node.stage.opaque for node in pipeline.nodes):
        return Rewrite(nodes, (Node(name, OneCheck(at, False), reads, (), (INVALID,)),))
    checked = f"{held}.checked"
    return Rewrite(
        nodes, (Node(name, OneCheck(at, True), (*reads, held), (checked,), (INVALID,)),), ((held, checked),)
    )


def _late(pipeline: Pipeline) -> set[str]:
    """Checks behind the recurrence: they need its result, or nothing before it reads their channel token by token."""
    graph = pipeline.graph
    estimators = [node.name for node in pipeline.nodes if isinstance(node.stage, ESTIMATORS)]
    behind = set().union(*(nx.descendants(graph, name) for name in estimators))
    before = set().union(*(nx.ancestors(graph, name) for name in estimators))
    by_token = [n for n in pipeline.nodes if n.name in before and not isinstance(n.stage, (Check, *PER_ROW))]
    read_before = {version for node in by_token for version in (*node.reads, *node.writes)}
    early_all = any(node.stage.opaque for node in pipeline.nodes) or not estimators
    late = set()
    for node in pipeline.nodes:
        if isinstance(node.stage, Check):
            version = node.reads[node.stage.reads.index(node.stage.of)]
            if node.name in behind or not (early_all or version in read_before):
                late.add(node.name)
    return late


one_check = Pass(
    "one_check",
    why="each check read its channels again: five passes over the batch become none",
    rules=((P(Check), gather),),
)
