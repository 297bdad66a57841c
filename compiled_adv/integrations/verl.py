"""verl's advantage estimators, computed here. Takes and gives what verl's own functions do, by their names.

    VERL_USE_EXTERNAL_MODULES=compiled_adv.integrations.verl   registers compiled_gae, compiled_grpo, compiled_rloo and
                                                               compiled_reinforce_plus_plus in every verl process
    COMPILED_ADV_VERL_REPLACE=gae,grpo                         and puts these in the place of verl's own functions

verl's dispatcher (compute_advantage) calls its own gae and grpo past the registry, and gives a registered estimator
neither values nor norm_adv_by_std_in_grpo, but the algorithm's configuration: the latter is read there; compiled_gae
serves those who pass values themselves, and says so to others. Numbers are verl's: unbiased deviations, eps 1e-6, a
prompt's only response raw, whitening by 1 / sqrt(variance + 1e-8). B responses, T tokens.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compiled_adv import recipes
from compiled_adv.advantage import OutcomeRewardInputs
from compiled_adv.batch import TrajBatchMeta
from compiled_adv.compiler import Compute, build
from compiled_adv.errors import AdvantageWarning, MissingKey, UnknownName, UnsupportedTrainer, suggest

SUPPORTED = ("0.9.1",)
REPLACE = "COMPILED_ADV_VERL_REPLACE"

Pair = tuple[Tensor, Tensor]  # advantages and returns, each float32 [B,T]


def gae(
    token_level_rewards: Tensor,
    values: Tensor | None = None,
    response_mask: Tensor | None = None,
    gamma: Any = None,
    lam: Any = None,
    config: Any = None,
    **_: Any,
) -> Pair:
    """Token GAE, whitened. Tensors [B,T]; gamma and lam come from the configuration where they are not given."""
    if values is None:
        what = "verl gives a registered estimator no values: they reach its own gae alone"
        hint = f"algorithm.adv_estimator=gae and {REPLACE}=gae"
        raise MissingKey(what, at="algorithm.adv_estimator", found="compiled_gae", hint=hint)
    assert response_mask is not None
    gamma, lam = (config.gamma if gamma is None else gamma), (config.lam if lam is None else lam)
    if _too_few(response_mask):
        return _own("gae")(token_level_rewards, values, response_mask, gamma, lam)
    return _token_gae(token_level_rewards, values, response_mask, float(gamma), float(lam), everywhere=True)


def reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **_: Any) -> Pair:
    """Discounted sums of rewards behind each token, whitened. Tensors [B,T]; gamma is the configuration's."""
    if _too_few(response_mask):
        return _own("reinforce_plus_plus")(token_level_rewards, response_mask, config=config)
    advantages_BT, sums_BT = _token_gae(token_level_rewards, None, response_mask, float(config.gamma), 1.0)
    return advantages_BT, torch.where(response_mask != 0, sums_BT, 0.0)


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **_: Any,
) -> Pair:
    """Each response's summed reward, normalised by its prompt. `index` [B]: labels of prompts, in any order."""
    std = norm_adv_by_std_in_grpo
    if std is None:
        std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    return _by_prompt(token_level_rewards, response_mask, index, std=bool(std), eps=epsilon)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, **_: Any) -> Pair:
    """Each response's summed reward less the mean of its prompt's others. `index` [B]: labels of prompts."""
    return _by_prompt(token_level_rewards, response_mask, index, std=False, leave_one_out=True)


ESTIMATORS: dict[str, Callable[..., Pair]] = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
}

# verl's own, and their parameters: (function, what we know it to take).
KNOWN = {
    "gae": ("compute_gae_advantage_return", "token_level_rewards values response_mask gamma lam"),
    "grpo": (
        "compute_grpo_outcome_advantage",
        "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
    ),
    "rloo": ("compute_rloo_outcome_advantage", "token_level_rewards response_mask index epsilon config kwargs"),
    "reinforce_plus_plus": (
        "compute_reinforce_plus_plus_outcome_advantage",
        "token_level_rewards response_mask config kwargs",
    ),
}


# ---- verl's tensors through our pipeline ----


def _token_gae(
    rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, gamma: float, lam: float, *, everywhere: bool = False
) -> Pair:
    """verl's numbers belong to actions, a rollout's to tokens: a column of prompt in front makes one the other.
    Rewards of single tokens are process rewards of turns of one token each."""
    rows, tokens = rewards_BT.shape
    zeros_BT = rewards_BT.new_zeros(rows, tokens + 1, dtype=torch.float32)
    turn_T = torch.arange(tokens + 1, device=rewards_BT.device)
    rollout = {
        "input_ids": zeros_BT.to(torch.int64),
        "attention_mask": torch.ones_like(zeros_BT, dtype=torch.bool),
        "loss_mask": pad(mask_BT, (1, 0)),
        "logprobs": zeros_BT,
        "rewards": zeros_BT[:, 0].clone(),
        "token_rewards": pad(rewards_BT, (1, 0)),
        "turn_ids": turn_T.expand(rows, -1).contiguous(),
        "is_truncated": torch.zeros_like(zeros_BT[:, 0], dtype=torch.bool),
    }
    if values_BT is not None:
        rollout["values"] = pad(values_BT, (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)  # of the outcome, which there is none of
        out = _instance(gamma, lam, everywhere)(rollout)
    return out["advantages"][:, :tokens].contiguous(), out["returns"][:, :tokens].contiguous()


@lru_cache(maxsize=16)
def _instance(gamma: float, lam: float, everywhere: bool) -> Compute:
    whiten = {"implementation": "compiled_adv.recipes.whiten", "kwargs": {"eps": 1e-8, "everywhere": everywhere}}
    actor = {
        "discount": gamma,
        "gae_lambda": lam,
        "kl_ctl": 0.0,
        "token_rewards_as_adv": False,
        "advantage": {"process_adv_shaping": whiten},
    }
    return build({"actor": actor})


def _too_few(mask_BT: Tensor) -> bool:
    """Whether there is no spread to whiten by; verl's own function says so in its own words."""
    return int(mask_BT.count_nonzero()) < 2


def _by_prompt(rewards_BT: Tensor, mask_BT: Tensor, index: Any, **how: Any) -> Pair:
    """One number per response, by its prompt; few enough that there is nothing to compile."""
    if index is None:
        what = "the estimator needs the prompt of each response"
        raise MissingKey(what, at="data.non_tensor_batch['uid']", hint="one label per response")
    with torch.no_grad():
        rows_G = _rows_of_prompts(index)
        order_B = torch.tensor([row for rows in rows_G for row in rows], device=rewards_BT.device)
        scores_B = rewards_BT.sum(-1)
        sizes = [len(rows) for rows in rows_G]
        meta = TrajBatchMeta(len(sizes), sizes, [rewards_BT.shape[1]] * len(sizes), None)
        inputs = OutcomeRewardInputs({"rewards": scores_B[order_B]}, None, meta)
        shaped_B = torch.empty_like(scores_B)
        shaped_B[order_B] = recipes.group_relative(inputs, **how).rewards.to(scores_B.dtype)
        advantages_BT = shaped_B[:, None] * mask_BT
    return advantages_BT, advantages_BT  # the same twice, as verl's


def _rows_of_prompts(index: Sequence[Any] | Any) -> list[list[int]]:
    rows: dict[Any, list[int]] = {}
    for row, label in enumerate(index.tolist() if hasattr(index, "tolist") else index):
        rows.setdefault(label, []).append(row)
    return list(rows.values())


# ---- registration ----


_originals: dict[str, Callable[..., Pair]] = {}


def enable(replace: Iterable[str] = ()) -> None:
    """Register every estimator as compiled_NAME, and put the named ones in the place of verl's own. Again is harmless.

    Raises UnsupportedTrainer for a verl whose functions are not those we know, UnknownName for a name that is none;
    then nothing has been changed.
    """
    core_algos, replace = _core_algos(), [name for name in replace if name]
    for name in replace:
        if name not in ESTIMATORS:
            raise UnknownName("verl has no such estimator of ours", at=REPLACE, found=name, hint=suggest(name, KNOWN))
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    for name, fn in ESTIMATORS.items():
        if getattr(registry.get(f"compiled_{name}"), "__module__", None) == __name__:
            del registry[f"compiled_{name}"]  # of this module before it was loaded anew
        core_algos.register_adv_est(f"compiled_{name}")(fn)
    for name in replace:
        if name not in _originals:
            _originals[name] = getattr(core_algos, KNOWN[name][0])
        _put(core_algos, name, ESTIMATORS[name])


def disable() -> None:
    """Put verl's own functions back, and take ours out of its registry."""
    from verl.trainer.ppo import core_algos

    for name in ESTIMATORS:
        core_algos.ADV_ESTIMATOR_REGISTRY.pop(f"compiled_{name}", None)
    while _originals:
        _put(core_algos, *_originals.popitem())


def _put(core_algos: Any, name: str, fn: Callable[..., Pair]) -> None:
    setattr(core_algos, KNOWN[name][0], fn)
    core_algos.ADV_ESTIMATOR_REGISTRY[name] = fn


def _own(name: str) -> Callable[..., Pair]:
    """verl's own function, replaced or not."""
    return _originals.get(name) or getattr(_core_algos(), KNOWN[name][0])


def _core_algos() -> Any:
    """verl's module of estimators, if it is one that we know."""
    import verl

    if verl.__version__ not in SUPPORTED:
        hint = f"verl {' or '.join(SUPPORTED)}, or leave compiled_adv out of VERL_USE_EXTERNAL_MODULES"
        raise UnsupportedTrainer("this verl is not known", at="verl.__version__", found=verl.__version__, hint=hint)
    from verl.trainer.ppo import core_algos

    for name, (function, parameters) in KNOWN.items():
        fn = _originals.get(name) or getattr(core_algos, function, None)
        found = "nothing" if fn is None else " ".join(inspect.signature(fn).parameters)
        if found != parameters:
            at, hint = f"verl.trainer.ppo.core_algos.{function}", f"verl {' or '.join(SUPPORTED)} as released"
            raise UnsupportedTrainer("a function of this verl takes other arguments", at=at, found=found, hint=hint)
    return core_algos


# verl imports its external modules for what this does.
if os.environ.get("VERL_USE_EXTERNAL_MODULES") and __name__ in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
    enable(name.strip() for name in os.environ.get(REPLACE, "").split(","))
