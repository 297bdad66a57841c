"""Takes a hypothesis draw; gives a configuration, a batch with metadata and per-call values that are all legal.

Every switch of the configuration is drawn, so a property tested on these cases is tested over the whole space. A
backend for which a configuration is dear draws from the twelve of FIXED instead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from compiled_adv import RolloutGroup, TrajBatchMeta

LAMBDAS = (
    (1.0, {}),
    (0.9, {}),
    (0.0, {}),
    (1.25, {}),
    ("compiled_adv.gae.vapo_length_adaptive_gae", {"alpha": 0.5}),
    ("compiled_adv.gae.relative_position_gae_lambda", {"q": 0.25}),
    ("compiled_adv.gae.constant_gae_lambda", {"value": 0.75}),
)


# It holds every case, so that a configuration is compiled once.
BUCKET = {"rows": [8], "tokens": [128]}

# Of adv_norm: far above the rounding of float32 advantages, which a smaller one would blow up to any size.
EPS = 0.05

# Of gvpo: an advantage that is zero but for rounding must lie well inside, since what is zero has another result.
ZERO_EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """One legal call."""

    config: dict[str, Any]
    batch: dict[str, Any]
    meta: TrajBatchMeta | None
    call: dict[str, Any]

    def on(self, backend: str) -> dict[str, Any]:
        """The configuration for another backend."""
        actor = self.config["actor"]
        chosen = {"backend": backend} | ({"compiled": {"buckets": BUCKET}} if backend == "compiled" else {})
        return {"actor": actor | {"advantage": actor.get("advantage", {}) | chosen}}

    def with_batch(self, batch: dict[str, Any]) -> Case:
        return replace(self, batch=batch)


@dataclass(frozen=True)
class Template:
    """A configuration with the optional keys and the shaping mode that decide which program it takes."""

    actor: dict[str, Any]
    keys: frozenset[str]
    mode: str = "additive"

    def levels(self) -> set[str | None]:
        """Levels at which it takes statistics."""
        norms = [norm for norm in (self.actor.get("reward_norm"), self.actor.get("adv_norm")) if norm]
        return {norm[level] for norm in norms for level in ("mean_level", "std_level")}


@st.composite
def norms(draw: st.DrawFn, levels: Sequence[str | None], eps: float) -> dict[str, Any] | None:
    if draw(st.booleans()):
        return None
    level = st.sampled_from(levels)
    return {
        "mean_level": draw(level),
        "std_level": draw(level),
        "mean_leave1out": draw(st.booleans()),
        "std_unbiased": draw(st.booleans()),
        "group_size": draw(st.integers(1, 3)),
        "eps": eps,
    }


@st.composite
def configs(draw: st.DrawFn, levels: Sequence[str | None]) -> dict[str, Any]:
    """A legal actor block with an `advantage` block."""
    flag = st.booleans()
    gae_lambda, kwargs = draw(st.sampled_from(LAMBDAS))
    actor: dict[str, Any] = {
        "discount": draw(st.sampled_from([1.0, 0.99, 0.5])),
        "gae_lambda": gae_lambda,
        "gae_lambda_kwargs": kwargs,
        "gae_timestep_unit": draw(st.sampled_from(["token", "turn"])),
        "kl_ctl": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "reward_bias": draw(st.sampled_from([0.0, -0.5])),
        "reward_scaling": draw(st.sampled_from([1.0, 2.0])),
        "reward_clip": draw(st.sampled_from([20.0, 1.5])),
        "reward_norm": draw(norms(levels, 1e-5)),
        "adv_norm": draw(norms(levels, EPS)),
        "mask_no_eos_with_zero": draw(flag),
        "token_rewards_as_adv": draw(flag),
        "use_decoupled_loss": draw(flag),
        "recompute_logprob": draw(flag),
        "overlong_reward_penalty": draw(flag),
        "overlong_tokens": 3,
        "overlong_penalty_factor": 0.5,
        "max_new_tokens": 4,
        "advantage": {"rules": draw(st.sampled_from(["default", "strict"]))},
    }
    return {"actor": actor}


OPTIONAL = frozenset(
    ("ref_logp", "values", "token_rewards", "is_truncated", "turn_ids", "prox_logp", "mopd_teacher_logp_sum")
)
LEVELS = ("batch", "group", None)
METAS = ("none", "sizes", "nulls", "rollouts")


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    fixed: Sequence[Template] | None = None,
    levels: Sequence[str | None] = LEVELS,
    metas: Sequence[str] = METAS,
    needs: frozenset[str] = frozenset(),
) -> Case:
    """A legal call.

    `fixed`: draw from these configurations only. `levels`: levels of statistics. `metas`: kinds of metadata. `needs`:
    optional keys that must be there.
    """
    if fixed is not None:
        fits = [t for t in fixed if t.levels() <= set(levels) and t.keys >= needs]
        template = draw(st.sampled_from(fits))
        config, keys = {"actor": template.actor}, set(template.keys)
    else:
        template, config = None, draw(configs(levels))
        keys = {key for key in sorted(OPTIONAL) if draw(st.booleans())} | needs
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    mode = template.mode if template else draw(st.sampled_from(["additive", "gvpo", "process_weighted"]))
    return make_case(rng, config, keys, mode, shape, draw(st.sampled_from(metas)))


def fixed_case(template: Template, rng: random.Random, rows: int, tokens: int, meta: str = "none") -> Case:
    """A legal call of a template, of this shape and kind of metadata."""
    return make_case(rng, {"actor": template.actor}, set(template.keys), template.mode, (rows, tokens), meta)


def make_case(
    rng: random.Random, config: dict[str, Any], keys: set[str], mode: str, shape: tuple[int, int], meta: str
) -> Case:
    """A legal call with these optional keys, and with those that the configuration needs."""
    actor = config["actor"]
    strict = (actor.get("advantage") or {}).get("rules") == "strict"
    by_turn = actor.get("gae_timestep_unit") == "turn"
    keys = keys | ({"prox_logp"} if actor.get("recompute_logprob") else set())
    keys |= {"turn_ids"} if by_turn else set()
    keys |= {"is_truncated"} if strict else set()

    legal_wrap = strict or not (by_turn or isinstance(actor.get("gae_lambda"), str))
    batch = make_batch(rng, *shape, wrap=legal_wrap)
    batch = {key: x for key, x in batch.items() if key in keys or key not in OPTIONAL}
    folds = not actor.get("token_rewards_as_adv", True)
    if mode == "process_weighted" and actor.get("mask_no_eos_with_zero"):
        mode = "gvpo"
    if mode != "additive" and folds:
        mode = "additive"
    if "token_rewards" in batch:
        _legal_process_rewards(batch, fold=folds, unit=mode == "process_weighted")
    call: dict[str, Any] = {"advantage_shaping_mode": mode}
    if mode == "gvpo":
        call["gvpo_zero_eps"] = ZERO_EPS
    return Case(config, batch, make_meta(rng, meta, batch), call)


def make_batch(rng: random.Random, rows: int, tokens: int, *, wrap: bool) -> dict[str, Any]:
    """Ragged rows with prompts, gaps and turns; quarter-valued numbers, so that ties happen."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def numbers(*shape: int, low: int = -8, high: int = 9) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.float32) / 4

    attention = torch.zeros(rows, tokens, dtype=torch.bool)
    loss_mask = torch.zeros(rows, tokens, dtype=torch.int64)
    turn_ids = torch.full((rows, tokens), -1, dtype=torch.int64)
    for b in range(rows):
        length = rng.choice([0, tokens, rng.randint(0, tokens)])
        attention[b, :length] = True
        turn, density = rng.randint(0, 1), rng.choice([0.3, 0.8, 1.0])
        for t in range(0 if wrap else 1, length):
            if rng.random() < density:
                loss_mask[b, t] = 1
                if rng.random() < 0.3 and turn + 1 < tokens:
                    turn += rng.randint(1, min(2, tokens - 1 - turn))
                turn_ids[b, t] = min(turn, tokens - 1)
    return {
        "input_ids": torch.randint(0, 100, (rows, tokens), generator=generator),
        "attention_mask": attention,
        "loss_mask": loss_mask,
        "rewards": numbers(rows, low=-4, high=5),
        "logprobs": numbers(rows, tokens, high=1),
        "prox_logp": numbers(rows, tokens, high=1),
        "ref_logp": numbers(rows, tokens, high=1),
        "values": numbers(rows, tokens),
        "token_rewards": numbers(rows, tokens, low=-4, high=5),
        "turn_ids": turn_ids,
        "is_truncated": torch.randint(0, 2, (rows,), generator=generator).bool(),
        "mopd_teacher_logp_sum": numbers(rows),
    }


def make_meta(rng: random.Random, kind: str, batch: dict[str, Any]) -> TrajBatchMeta | None:
    """Prompt groups that cover the batch. Rows of a split rollout without a reference become alike, as they must be."""
    rows, tokens = batch["loss_mask"].shape
    if kind == "none":
        return None
    sizes = _sizes(rng, rows, 3)
    if kind != "rollouts":
        return TrajBatchMeta(len(sizes), sizes, [tokens] * len(sizes), None if kind == "sizes" else [None] * len(sizes))
    groups: list[RolloutGroup | None] = []
    like: list[int] = []  # the row that each row takes its tensors from
    for size in sizes:
        counts = _sizes(rng, size, size)
        references = rng.choice([(), tuple(rng.choice([None, rng.randint(-4, 4) / 4]) for _ in counts)])
        group = rng.choice([None, RolloutGroup(tuple(counts), references)])
        groups.append(group)
        for count, reference in zip(counts, references or [None] * len(counts), strict=True):
            free = group is None or reference is not None
            like += range(len(like), len(like) + count) if free else [len(like)] * count
    for key in ("rewards", "loss_mask", "attention_mask", "turn_ids", "token_rewards"):
        if key in batch:
            batch[key] = batch[key][like]
    return TrajBatchMeta(len(sizes), sizes, [tokens] * len(sizes), groups)


def _sizes(rng: random.Random, total: int, largest: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(rng.randint(1, min(largest, total - sum(sizes))))
    return sizes


def _legal_process_rewards(batch: dict[str, Any], *, fold: bool, unit: bool) -> None:
    rewards, mask = batch["token_rewards"], batch["loss_mask"]
    if unit:
        batch["token_rewards"] = rewards.abs() / 4
    if fold:
        ids = batch.get("turn_ids")
        for b in range(mask.shape[0]):
            for t in range(1, mask.shape[1]):
                same = ids is None or ids[b, t] == ids[b, t - 1]
                if mask[b, t] and mask[b, t - 1] and same:
                    rewards[b, t] = rewards[b, t - 1]


def _norm(mean: str | None, std: str | None, **more: Any) -> dict[str, Any]:
    return {"mean_level": mean, "std_level": std, **more}


_CRITIC = frozenset({"values", "ref_logp", "is_truncated"})
_STRICT = {"rules": "strict"}
_VAPO = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.5}}
_PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 3,
    "overlong_penalty_factor": 0.5,
    "max_new_tokens": 4,
}

# Twelve configurations that between them take every built-in stage, under both rule sets.
FIXED = (
    Template({}, frozenset({"is_truncated"})),
    Template({"kl_ctl": 0.0, "reward_norm": _norm("group", "group", group_size=2)}, frozenset()),
    Template(
        {"discount": 0.99, "gae_lambda": 0.9, "adv_norm": _norm("batch", "batch")},
        _CRITIC,
    ),
    Template(
        {"reward_norm": _norm("batch", None, mean_leave1out=True), "kl_estimator": "k3", "recompute_logprob": True},
        frozenset({"ref_logp", "prox_logp", "mopd_teacher_logp_sum"}),
    ),
    Template(_VAPO | _PENALTY | {"adv_norm": _norm("group", "batch")}, _CRITIC | {"turn_ids"}),
    Template(
        {"reward_norm": _norm("group", None, mean_leave1out=True), "token_rewards_as_adv": False},
        frozenset({"token_rewards", "turn_ids", "is_truncated"}),
    ),
    Template(
        {"gae_timestep_unit": "turn", "discount": 0.5, "adv_norm": _norm("group", "group", std_unbiased=False)},
        _CRITIC | {"turn_ids", "token_rewards"},
        "gvpo",
    ),
    Template(
        {"gae_timestep_unit": "turn", "use_decoupled_loss": True, "token_rewards_as_adv": False},
        _CRITIC | {"turn_ids", "token_rewards", "prox_logp"},
    ),
    Template(
        {"kl_ctl": 0.0, "reward_scaling": 2.0, "reward_bias": -0.5}, frozenset({"token_rewards"}), "process_weighted"
    ),
    Template(
        {"mask_no_eos_with_zero": True, "reward_norm": _norm("group", "group"), "advantage": _STRICT} | _PENALTY,
        _CRITIC,
    ),
    Template(
        {"gae_timestep_unit": "turn", "kl_estimator": "k2", "advantage": _STRICT, "adv_norm": _norm("batch", "batch")},
        _CRITIC | {"turn_ids", "token_rewards"},
    ),
    Template(
        {"gae_lambda": 1.25, "discount": 0.5, "reward_norm": _norm(None, "group"), "advantage": _STRICT},
        frozenset({"values", "is_truncated", "token_rewards"}),
        "gvpo",
    ),
)
