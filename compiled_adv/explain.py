"""Takes a Pipeline; gives its facts for machines, and its text for people.

The same Pipeline gives the same text, so that two of them can be compared line by line.
"""

from typing import Any

from compiled_adv.pipeline import FLAG, Pipeline


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
