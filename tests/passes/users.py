"""Passes and stages that tests name by dotted path: an honest one, and ones that are wrong in one way each."""

from dataclasses import replace

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite
from compiled_adv.stages.alignment import Lengths
from compiled_adv.stages.estimator import PlaceOutcome, TokenGAE, TurnGAE
from compiled_adv.stages.reward_norm import Score


class SameScore(Score):
    """Score under another name."""


def other_name(pipeline: Pipeline, node: Node) -> Rewrite | str:
    if isinstance(node.stage, SameScore):
        return "it has its new name"
    return instead(node, SameScore(**node.stage.numbers()))


def instead(node: Node, stage) -> Rewrite:
    """One stage in another's place, with the same reads and writes."""
    return Rewrite((node,), (replace(node, stage=stage),))


honest = Pass("honest", why="for tests", rules=((P(Score), other_name),))


def half_discount(pipeline: Pipeline, node: Node) -> Rewrite | None:
    return instead(node, TokenGAE(0.5)) if node.stage != TokenGAE(0.5) else None


wrong = Pass("wrong", why="gives other numbers", rules=((P(TokenGAE), half_discount),))


class ReadsTheHost(TokenGAE):
    """A stage that no compiler can capture."""

    def forward(self, *channels):
        if channels[0].sum().item() > 1e30:
            raise RuntimeError("too large")
        return super().forward(*channels)


def to_the_host(pipeline: Pipeline, node: Node) -> Rewrite | None:
    if isinstance(node.stage, ReadsTheHost):
        return None
    return instead(node, ReadsTheHost(**node.stage.numbers()))


untraceable = Pass("untraceable", why="reads the host", rules=((P(TokenGAE), to_the_host),))


def drop_lengths(pipeline: Pipeline, node: Node) -> Rewrite:
    return Rewrite((node,))


breaks = Pass("breaks", why="others read what it removes", rules=((P(Lengths), drop_lengths),))


def twice(pipeline: Pipeline, node: Node) -> Rewrite:
    return Rewrite((), (replace(node, name="Again"),))


doubles = Pass("doubles", why="writes each version twice", rules=((P(Score), twice),))


class UnflaggedOutcome(PlaceOutcome):
    """An outcome on a masked token goes unnoticed."""

    flags = PlaceOutcome.flags[1:]

    def forward(self, *channels):
        outcome_BT, _, *others = super().forward(*channels)
        return outcome_BT, *others


def unnoticed(pipeline: Pipeline, node: Node) -> Rewrite | None:
    if isinstance(node.stage, UnflaggedOutcome):
        return None
    stage = UnflaggedOutcome(**node.stage.numbers())
    return Rewrite((node,), (replace(node, stage=stage, flags=node.flags[1:]),))


loses_a_flag = Pass("loses_a_flag", why="drops a warning", rules=((P(PlaceOutcome), unnoticed),))


class Short(Rewrite):
    """A Rewrite that forgets an output."""

    def applied(self, pipeline: Pipeline) -> Pipeline:
        changed = super().applied(pipeline)
        return replace(changed, outputs=tuple(pair for pair in changed.outputs if pair[0] != "tot_rewards"))


def short(pipeline: Pipeline, node: Node) -> Rewrite:
    return Short((node,), (replace(node, name="Renamed"),))


loses_an_output = Pass("loses_an_output", why="drops tot_rewards", rules=((P(TokenGAE), short), (P(TurnGAE), short)))


def back_and_forth(pipeline: Pipeline, node: Node) -> Rewrite:
    numbers = node.stage.numbers()
    return instead(node, Score(**numbers | {"bias": -numbers["bias"] or 1.0}))


never_settles = Pass("never_settles", why="undoes itself", rules=((P(Score), back_and_forth),))

rounds = Pass("rounds", why="may round differently", rules=((P(Score), other_name),), numerics="close")

not_a_pass = other_name
