"""Score, units, their moments and the normalisation of rewards as one node.  [exact]"""

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, fuse
from compiled_adv.stages.reward_norm import RewardNorm, Score, SingleUnits, Units
from compiled_adv.stages.statistics import AcrossRanks, BatchMoments, GroupCentred, GroupMoments

PARTS = (Score, Units, GroupMoments, SingleUnits, GroupCentred, BatchMoments)


def whole(pipeline: Pipeline, score: Node, norm: Node) -> Rewrite | str:
    """Everything between the reward and its score, which nothing else reads."""
    nodes = pipeline.nodes[pipeline.nodes.index(score) : pipeline.nodes.index(norm)]
    if any(isinstance(node.stage, AcrossRanks) for node in nodes):
        return "ranks meet in between"
    feeding = [node for node in nodes if isinstance(node.stage, PARTS)]
    return fuse(pipeline, *feeding, norm)


fuse_reward_norm = Pass(
    "fuse_reward_norm",
    why="per-row work of a few microseconds: no time, but one node to read where there were up to seven",
    rules=((P(Score) >> P(RewardNorm), whole),),
)
