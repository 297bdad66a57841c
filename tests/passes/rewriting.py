"""Takes a pass and a configuration; gives the Pipeline before and after it, the log, and both Pipelines' numbers."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from compiled_adv.admit import Admitted, admit, admit_call
from compiled_adv.errors import BatchError
from compiled_adv.executable import EagerExecutable
from compiled_adv.pipeline import Pipeline, wire
from compiled_adv.program import lower
from compiled_adv.resolve import resolve_spec
from compiled_adv.rewrite import Pass, RewriteLog, rewrite
from compiled_adv.spec import load_config
from compiled_adv.status import ERRORS
from tests.random_cases import Case
from tests.unit.wiring import wired

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Ran:
    """What passes did to one Pipeline."""

    before: Pipeline
    after: Pipeline
    log: RewriteLog

    @property
    def fired(self) -> int:
        return self.log.rewrites

    @property
    def held(self) -> dict[str, str]:
        """Reasons by place."""
        return {entry.place: entry.what for entry in self.log.entries if not entry.done}


def ran(pipeline: Pipeline, *passes: Pass) -> Ran:
    after, log = rewrite(pipeline, passes)
    return Ran(pipeline, after, log)


def run_on(actor: dict[str, Any], *passes: Pass, **wiring: Any) -> Ran:
    """Passes on the Pipeline of an actor block; `wiring`: batch, mode, mopd, across_ranks."""
    return ran(wired(actor, **wiring)[0], *passes)


def of_case(case: Case) -> tuple[Pipeline, Admitted]:
    """A random case's Pipeline, and the case as channels."""
    spec = load_config(case.config)
    resolved = resolve_spec(spec)
    call = admit_call(case.call, spec, resolved)
    admitted = admit(case.batch, case.meta, call, spec, resolved)
    mopd = "mopd_teacher_logp_sum" in case.batch
    return wire(spec, resolved, frozenset(admitted.channels), call.advantage_shaping_mode, mopd=mopd), admitted


def numbers(pipeline: Pipeline, admitted: Admitted) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]] | None:
    """Outputs and flags of a Pipeline run eagerly; None where the batch is refused, by name or as `invalid`."""
    try:
        outputs, flags = EagerExecutable(lower(pipeline)).run(admitted)
    except BatchError:
        return None
    return None if flags.keys() & {"invalid", *ERRORS} else (outputs, flags)


def assert_same_numbers(found: Ran, admitted: Admitted) -> bool:
    """Every output and flag is the same, bit for bit; 0.0 and -0.0 are one number. Gives whether there was a result."""
    want, got = numbers(found.before, admitted), numbers(found.after, admitted)
    assert (got is None) == (want is None), "one of them refuses this batch"
    if want is None or got is None:
        return False
    assert got[1] == want[1]
    assert list(got[0]) == list(want[0])
    for name, expected in want[0].items():
        assert got[0][name].dtype == expected.dtype and torch.equal(got[0][name], expected), name
    return True


def assert_settled(found: Ran, *passes: Pass) -> None:
    """A second run changes nothing, and the first changed something."""
    assert found.fired
    again = ran(found.after, *passes)
    assert again.after == found.after and not again.fired
