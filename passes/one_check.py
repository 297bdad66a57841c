"""Read every check of a batch in one pass instead of one pass each.  [exact]

Checks are summed before their one reduction over tokens, in at most two lots, by what the estimator reads. Which check
failed is then no longer known: the compiled path only says `invalid`, and the eager path, which runs in that case,
names it.

    token GAE           checks of channels that are read before it, which it waits for; the others (values, process
                        rewards, the result) behind it, where their channels are read again
    turn GAE            all but the result; it waits for none, or KL, which it has no use for, is read a second time
    the outcome alone   one lot: every channel is written in one pass
    a user's function   every check that can runs before it
"""

import networkx as nx

from compiled_adv.channel import base
from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import INVALID, P, Pass, Rewrite
from compiled_adv.stages.checks import Check, FirstToken, OneCheck
from compiled_adv.stages.estimator import BootstrapValues, TokenGAE, TurnGAE

PER_ROW = (BootstrapValues, FirstToken)  # they read one column


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
    waiting = _waiting(pipeline)
    if first.name in late or waiting is None:
        flag = f"{INVALID}.late" if first.name in late else INVALID
        return Rewrite(nodes, (Node(name, OneCheck(at, False), reads, (), (flag,)),))
    held = next(v for v in waiting.reads if v and base(v) == "gae_lambda")
    checked = f"{held}.checked"
    one = Node(name, OneCheck(at, True), (*reads, held), (checked,), (INVALID,))
    return Rewrite(nodes, (one,), ((held, checked),))


def _waiting(pipeline: Pipeline) -> Node | None:
    """The recurrence that is to wait for the early lot."""
    if any(node.stage.opaque for node in pipeline.nodes):
        return None
    return next((node for node in pipeline.nodes if isinstance(node.stage, TokenGAE)), None)


def _late(pipeline: Pipeline) -> set[str]:
    """Checks that need what an estimator or a user's function gives, or whose channel nothing reads token by token
    before the recurrence that waits."""
    graph, waiting = pipeline.graph, _waiting(pipeline)
    checks = [(node, node.stage) for node in pipeline.nodes if isinstance(node.stage, Check)]
    ahead = [node.name for node in pipeline.nodes if node.stage.opaque or isinstance(node.stage, (TokenGAE, TurnGAE))]
    late = set().union(*(nx.descendants(graph, name) for name in ahead)) & {node.name for node, _ in checks}
    if waiting is None:
        return late
    before = nx.ancestors(graph, waiting.name)
    by_token = [n for n in pipeline.nodes if n.name in before and not isinstance(n.stage, (Check, *PER_ROW))]
    read_before = {version for node in by_token for version in (*node.reads, *node.writes)}
    return late | {node.name for node, check in checks if node.reads[check.reads.index(check.of)] not in read_before}


one_check = Pass(
    "one_check",
    why="each check read its channels again: five passes over the batch become none",
    rules=((P(Check), gather),),
)
