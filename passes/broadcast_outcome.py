"""Turn the recurrence into a broadcast where it is one.  [exact]

Without a critic, KL or folded rewards, at discount and lambda 1, the advantage of every column up to the outcome is the
outcome: the common GRPO case.
"""

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite
from compiled_adv.stages.estimator import ConstantLambda, OutcomeEverywhere, PlaceOutcome, TokenGAE, TotalRewards


def broadcast(pipeline: Pipeline, place: Node, total: Node, gae: Node) -> Rewrite | str:
    _, kl, folded = total.reads
    _, values, _, _, is_truncated, gae_lambda, _ = gae.reads
    source = next((node for node in pipeline.nodes if gae_lambda in node.writes), None)
    assert isinstance(gae.stage, TokenGAE) and isinstance(place.stage, PlaceOutcome)
    if kl is not None:
        return "KL is in the recurrence"
    if values is not None:
        return "a critic is in the recurrence"
    if folded is not None:
        return "folded process rewards are in the recurrence"
    if gae.stage.discount != 1:
        return f"discount is {gae.stage.discount}, not 1"
    if source is None or source.stage != ConstantLambda(1.0):
        return f"lambda is {source and source.stage}, not 1"
    scores, lengths, actions, _ = place.reads
    stage = OutcomeEverywhere(place.stage)
    return Rewrite((gae,), (Node(gae.name, stage, (scores, lengths, actions, is_truncated), gae.writes),))


broadcast_outcome = Pass(
    "broadcast_outcome",
    why="the recurrence reads two channels and writes one; the broadcast reads none",
    rules=((P(PlaceOutcome) >> P(TotalRewards) >> P(TokenGAE), broadcast),),
)
