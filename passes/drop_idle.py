"""Drop what the configuration makes idle: no KL, no levels in a norm block.  [exact]"""

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, readers
from compiled_adv.stages.adv_norm import ActiveAdvantages, AdvantageMoments, AdvantageScale, AdvNorm
from compiled_adv.stages.kl_rewards import KLInAdvantage, KLRewards, NoKLRewards
from compiled_adv.stages.plugin import PluginStage


def no_kl(pipeline: Pipeline, node: Node) -> Rewrite | None:
    """kl_ctl 0: whatever the divergence, the penalty is 0."""
    assert isinstance(node.stage, KLRewards)
    if node.stage.kl_ctl != 0:
        return None
    logprobs, _, n_actions = node.reads
    return Rewrite((node,), (Node(node.name, NoKLRewards(), (logprobs, n_actions), node.writes, node.flags),))


def no_kl_to_add(pipeline: Pipeline, zero: Node, node: Node) -> Rewrite | str:
    """A penalty of 0 need not be added."""
    if any(isinstance(reader.stage, PluginStage) for reader in readers(pipeline, node.writes[0])):
        return "a user's estimator is owed its kl_rewards"
    return Rewrite((node,), (), ((node.writes[0], None),))


def no_levels(pipeline: Pipeline, moments: Node, scale: Node, norm: Node) -> Rewrite | None:
    """No mean and no scale: the mask alone is left."""
    assert isinstance(scale.stage, AdvantageScale)
    if scale.stage.norm.mean_level is not None or scale.stage.norm.std_level is not None:
        return None
    advantages, mask = norm.reads[:2]
    reads = (advantages, mask, "n_active")
    return Rewrite((moments, scale, norm), (Node(norm.name, ActiveAdvantages(), reads, norm.writes),))


drop_idle = Pass(
    "drop_idle",
    why="a penalty that is 0 costs two passes over the batch, and holds back broadcast_outcome",
    rules=(
        (P(KLRewards), no_kl),
        (P(NoKLRewards) >> P(KLInAdvantage), no_kl_to_add),
        (P(AdvantageMoments) >> P(AdvantageScale) >> P(AdvNorm), no_levels),
    ),
)
