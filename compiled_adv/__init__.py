"""Policy-gradient advantages for LLM reinforcement learning: config in, advantages out. See README.md."""

from compiled_adv.advantage import (
    AdvantageInputs,
    AdvantageResult,
    OutcomeResult,
    OutcomeRewardInputs,
    ProcessAdvantageInputs,
)
from compiled_adv.advantage_algorithms import TemporalInputs, TemporalResult
from compiled_adv.batch import RolloutGroup, TrajBatchMeta, concat_batch, split_batch
from compiled_adv.compiler import Compute, build
from compiled_adv.errors import AdvantageWarning, CompiledAdvError
from compiled_adv.gae import GAELambdaContext, GAELambdaInputs
from compiled_adv.plugins import discounted_sum, pad_safe, per_group, per_trajectory
from compiled_adv.spec import Spec, load_config

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "AdvantageWarning",
    "CompiledAdvError",
    "Compute",
    "GAELambdaContext",
    "GAELambdaInputs",
    "OutcomeResult",
    "OutcomeRewardInputs",
    "ProcessAdvantageInputs",
    "RolloutGroup",
    "Spec",
    "TemporalInputs",
    "TemporalResult",
    "TrajBatchMeta",
    "build",
    "concat_batch",
    "discounted_sum",
    "load_config",
    "pad_safe",
    "per_group",
    "per_trajectory",
    "split_batch",
]
