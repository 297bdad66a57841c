"""Takes a Pipeline; gives its facts for machines, and its text for people.

The same Pipeline gives the same text, so that two of them can be compared line by line.
"""

from typing import Any

from compiled_adv.pipeline import FLAG, Node, Pipeline
from compiled_adv.program import Program, Segment
from compiled_adv.rewrite import RewriteLog
from compiled_adv.stages.plugin import PluginStage
from compiled_adv.stages.statistics import AcrossRanks


def describe(pipeline: Pipeline) -> dict[str, Any]:
    """Inputs, stages in order (stage with its numbers, reads, writes, flags), outputs: JSON."""
    stages = [
        {
            "name": node.name,
            "stage": str(node.stage),
            "config": node.stage.slot,
            "reads": list(node.reads),
            "writes": list(node.writes),
            "flags": [flag.removeprefix(FLAG) for flag in node.flags],
        }
        for node in pipeline.nodes
    ]
    return {"inputs": list(pipeline.inputs), "stages": stages, "outputs": dict(pipeline.outputs)}


def show_pipeline(pipeline: Pipeline, title: str = "pipeline") -> str:
    """One line for each stage: number, stage with its numbers, reads -> writes, flags behind an exclamation mark."""
    facts = describe(pipeline)
    stages = facts["stages"]
    number = len(str(len(stages)))
    width = min(48, max((len(s["stage"]) for s in stages), default=1))
    lines = [f"{title}: {len(stages)} stages", f"  {'in':<{number}}  {' '.join(facts['inputs'])}"]
    for i, s in enumerate(stages):
        reads = " ".join(version or "-" for version in s["reads"])
        writes = " ".join((*s["writes"], *("!" + flag for flag in s["flags"])))
        lines.append(f"  {i:<{number}}  {s['stage']:<{width}}  {reads} -> {writes}")
    leaves = " ".join(f"{name}={version}" for name, version in facts["outputs"].items())
    return "\n".join([*lines, f"  {'out':<{number}} {leaves}"])


def explain_text(log: RewriteLog, program: Program) -> str:
    """The Pipeline as wired and after each pass that changed it, what held back and why, and the Program."""
    parts = [show_pipeline(pipeline, title) for title, pipeline in log.snapshots]
    held = [f"  {e.name}: {e.place}: {e.what}  {e.source}".rstrip() for e in log.entries if not e.done]
    done = [f"  {e.name}: {e.place} {e.what}  {e.source}".rstrip() for e in log.entries if e.done]
    if done:
        parts.append("\n".join(["rewritten", *done]))
    if held:
        parts.append("\n".join(["held back", *held]))
    return "\n\n".join([*parts, show_program(program)])


def explain_json(log: RewriteLog, program: Program) -> dict[str, Any]:
    """The same as facts."""
    return {
        "pipelines": [{"after": title, **describe(pipeline)} for title, pipeline in log.snapshots],
        "rewrites": [vars(entry) for entry in log.entries],
        "functions": describe_functions(log.snapshots[0][1]),
        "program": show_program(program),
    }


def describe_functions(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Where each user's function runs in the compiled backend (see placing.py), and why not in the Program: JSON."""
    functions = []
    for node in pipeline.nodes:
        if isinstance(node.stage, PluginStage):
            plugin, config = node.stage.plugin, node.stage.slot
            place = vars(plugin.place) if node.stage.opaque else {"where": "program", "why": "", "line": "", "hint": ""}
            functions.append({"name": node.name, "config": config, "function": plugin.path, **place})
    return functions


def show_program(program: Program) -> str:
    """The Program as runnable Python: one module class for each segment, then what runs where."""
    lines = ["program", *(f"# segment {i}: {_segment(s)}" for i, s in enumerate(program.segments))]
    return "\n".join(lines)


def _segment(segment: Segment) -> str:
    if isinstance(segment.module, Node):
        stage = segment.module.stage
        if isinstance(stage, AcrossRanks):
            return f"{stage}: {', '.join(segment.inputs)} -> {', '.join(segment.outputs)}, an all_reduce"
        lines = [f"{stage}, a user's function, at the batch's own shape"]
        if isinstance(stage, PluginStage) and stage.plugin.place.why:
            lines.append(f"#   {stage.plugin.place}")
            lines += [f"#   try {stage.plugin.place.hint}"] if stage.plugin.place.hint else []
        return "\n".join(lines)
    return segment.module.code
