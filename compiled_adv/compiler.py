"""Takes a config; gives the callable that turns rollouts into advantages. The composition root.

    config --parse--> Spec --wire--> Pipeline --lower--> Program --> Executable --run--> outputs
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compiled_adv import reference
from compiled_adv.admit import Admitted, admit, admit_call
from compiled_adv.advantage import AdvantageInputs
from compiled_adv.batch import concat_batch, split_batch
from compiled_adv.channel import OPTIONAL, OUTPUTS
from compiled_adv.executable import EagerExecutable
from compiled_adv.explain import describe, show_pipeline
from compiled_adv.pipeline import Pipeline, wire
from compiled_adv.program import lower
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import Spec, load_config
from compiled_adv.stages.plugin import call_compute
from compiled_adv.status import raise_errors, warn
from compiled_adv.verify import verify


class Compute:
    """Advantages of a batch, by one configuration. Build it with `compiled_adv.build`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.last_warnings: dict[str, list[int]] = {}
        self._resolved = resolve_spec(spec)
        self._warned: set[str] = set()
        self._executables: dict[Any, EagerExecutable] = {}
        self._keeps_rewards = self._resolved.outcome is None and not spec.overlong_reward_penalty

    def __call__(self, batch: Mapping[str, Any], meta: Any = None, **per_call: Any) -> dict[str, Any]:
        """One padded batch -> a new dict: the batch's own entries, and every computed channel as a new tensor.

        Raises a CompiledAdvError before or after the work; the batch is never written to. `per_call`:
        advantage_shaping_mode, gvpo_negative_scale, gvpo_zero_penalty, gvpo_zero_eps.
        """
        call = admit_call(per_call, self.spec, self._resolved)
        with torch.inference_mode(False), torch.no_grad(), _plain_arithmetic(batch):
            admitted = admit(batch, meta, call, self.spec, self._resolved)
            computed, flags = self._override(admitted) if self._resolved.compute else self._run(admitted)
            raise_errors(flags)
            self.last_warnings = warn(flags, self._warned)
            return _packed(admitted, computed)

    def compute_advantages(self, rollouts: Sequence[Mapping[str, Any]], **per_call: Any) -> list[dict[str, Any]]:
        """One dict per prompt -> one dict per prompt, computed as one batch."""
        batch, meta = concat_batch(rollouts)
        return split_batch(self(batch, meta, **per_call), meta)

    def explain(self, format: str = "text", channels: Sequence[str] = OPTIONAL, mode: str = "additive") -> Any:
        """The Pipeline for a batch that carries these optional channels: text, or facts for `format="json"`."""
        pipeline = self._pipeline(frozenset(BARE | set(channels)), mode)
        return describe(pipeline) if format == "json" else show_pipeline(pipeline)

    def _run(self, admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        if self.spec.advantage.backend == "reference":
            return reference.run(self.spec, self._resolved, admitted.data, admitted.meta, admitted.call)
        key = (frozenset(admitted.channels), admitted.call.advantage_shaping_mode, MOPD in admitted.data)
        if key not in self._executables:
            self._executables[key] = EagerExecutable(lower(self._pipeline(*key)))
        computed, flags = self._executables[key].run(admitted)
        raw = admitted.data["rewards"]
        if self._keeps_rewards and not raw.is_floating_point() and raw.dtype != torch.bool:
            computed["rewards"] = raw.detach().clone()
        return computed, flags

    def _pipeline(self, channels: frozenset[str], mode: str, mopd: bool = False) -> Pipeline:
        return verify(wire(self.spec, self._resolved, channels, mode, mopd=mopd))

    def _override(self, admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        assert self._resolved.compute is not None
        data, call = MappingProxyType(dict(admitted.data)), admitted.call
        inputs = AdvantageInputs(data, admitted.config, admitted.meta, call.advantage_shaping_mode, *call.gvpo)
        return call_compute(self._resolved.compute, inputs, decoupled=self.spec.use_decoupled_loss), {}


MOPD = "mopd_teacher_logp_sum"

# Input channels that every batch has.
BARE = frozenset(
    ("attention_mask", "loss_mask", "rewards", "logprobs", "is_truncated", "member_of_row", "first_row")
    + ("references", "group_of_row", "facts", "gvpo")
)


def build(config: Any) -> Compute:
    """Config -> Compute. `config`: a path, the name of a shipped recipe, a mapping with an `actor` key or the actor
    block itself, or a trainer's config object."""
    return Compute(load_config(config))


def _plain_arithmetic(batch: Any) -> Any:
    """Autocast off: it would round matrix products."""
    mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
    device = mask.device.type if isinstance(mask, Tensor) else "cpu"
    return torch.autocast(device if device in ("cpu", "cuda") else "cpu", enabled=False)


def _packed(admitted: Admitted, computed: Mapping[str, Tensor]) -> dict[str, Any]:
    """The batch's own entries as they are, and what was computed over them."""
    out = dict(admitted.data)
    for name in (*OUTPUTS, "input_token_loss_mask"):
        if name in computed:
            x = computed[name]
            out[name] = x.to(torch.bool) if name == "is_truncated" else x
    return out
