"""Takes a Pipeline; gives nothing, or the error that names the broken property. Run around every pass.

The legal graph is the table at the end: (property, why it must hold).
"""

from collections import Counter
from collections.abc import Callable

import networkx as nx

from compiled_adv.errors import Cycle, DoubleWrite, GraphError, MissingChannel, UnusedStage
from compiled_adv.pipeline import Pipeline


def every_read_is_written(pipeline: Pipeline) -> None:
    known = set(pipeline.inputs) | {v for node in pipeline.nodes for v in node.produced}
    for node in pipeline.nodes:
        for version in node.reads:
            if version is not None and version not in known:
                raise MissingChannel(f"{node.name} reads '{version}', which nothing writes", at=node.stage.slot or None)
    for name, version in pipeline.outputs:
        if version not in known:
            raise MissingChannel(f"output '{name}' is '{version}', which nothing writes")


def each_version_is_written_once(pipeline: Pipeline) -> None:
    writes = Counter([*pipeline.inputs, *(v for node in pipeline.nodes for v in node.produced)])
    twice = [version for version, count in writes.items() if count > 1]
    if twice:
        writers = [node.name for node in pipeline.nodes if twice[0] in node.produced]
        raise DoubleWrite(f"'{twice[0]}' is written more than once", found=", ".join(writers))


def names_are_unique(pipeline: Pipeline) -> None:
    twice = [name for name, count in Counter(node.name for node in pipeline.nodes).items() if count > 1]
    if twice:
        raise DoubleWrite(f"two stages are named '{twice[0]}'")


def nothing_waits_for_itself(pipeline: Pipeline) -> None:
    if not nx.is_directed_acyclic_graph(pipeline.graph):
        loop = " -> ".join(edge[0] for edge in nx.find_cycle(pipeline.graph))
        raise Cycle("stages wait for each other", found=loop)


def every_stage_is_used(pipeline: Pipeline) -> None:
    useful = nx.ancestors(pipeline.graph, "out")
    for node in pipeline.nodes:
        if node.name not in useful:
            found = f"{node.name} writes {', '.join(node.writes) or 'nothing'}"
            what = "neither an output nor a flag depends on this stage"
            raise UnusedStage(what, at=node.stage.slot or None, found=found)


def arity_fits(pipeline: Pipeline) -> None:
    for node in pipeline.nodes:
        stage = node.stage
        if not stage.reads and not stage.writes:  # a fused stage: its node says what it reads and writes
            continue
        wanted = (len(stage.reads), len(stage.writes), len(stage.flags))
        if wanted != (got := (len(node.reads), len(node.writes), len(node.flags))):
            raise GraphError(f"{node.name} declares (reads, writes, flags) {wanted}", found=str(got))
        for name, version in zip(stage.reads, node.reads, strict=True):
            if version is None and not name.endswith("?"):
                raise MissingChannel(f"{node.name} needs '{name}'", at=stage.slot or None)


LEGAL: tuple[tuple[Callable[[Pipeline], None], str], ...] = (
    (names_are_unique, "a graph is addressed by stage names"),
    (arity_fits, "a stage gets its arguments by position"),
    (each_version_is_written_once, "who reads a version must not depend on the order of stages"),
    (every_read_is_written, "no stage may read what was never computed"),
    (nothing_waits_for_itself, "stages run one after another"),
    (every_stage_is_used, "a stage without readers is a mistake in wiring or in a pass"),
)


def verify(pipeline: Pipeline) -> Pipeline:
    """The same Pipeline, if it is legal."""
    for holds, _why in LEGAL:
        holds(pipeline)
    return pipeline
