"""Functions that the contract tests name by dotted path: honest ones, ones that return something wrong or write.

Each honest function notes what it was given in SEEN, which the tests clear.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from compiled_adv import AdvantageResult, OutcomeResult, TemporalResult
from compiled_adv.gae import compute_gae_lambda

SEEN: list[Any] = []


# ---- what may be wrong with a tensor ----

WRONGS = {
    "list": lambda x: x.tolist(),
    "none": lambda x: None,
    "number": lambda x: 1.0,
    "numpy": lambda x: x.numpy(),
    "too_long": lambda x: torch.cat([x, x[:1]]),
    "too_short": lambda x: x[:-1],
    "extra_dim": lambda x: x[..., None],
    "scalar": lambda x: x.sum(),
    "int": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "nan": lambda x: torch.full_like(x, torch.nan),
    "inf": lambda x: torch.full_like(x, torch.inf),
    "overflow": lambda x: torch.full_like(x, 1e300, dtype=torch.float64),
}


def _wrong(x: torch.Tensor, wrong: str | None) -> Any:
    return x if wrong is None else WRONGS[wrong](x)


# ---- ways to write to an input ----


def _numpy_view(x: torch.Tensor) -> None:
    x.numpy()[...] = 99


def _setitem(x: torch.Tensor) -> None:
    x[...] = 99


WRITES = {
    "in_place_op": lambda x: x.add_(99),
    "setitem": _setitem,
    "numpy_view": _numpy_view,
    "out_argument": lambda x: torch.add(x, 99, out=x),
    "resize": lambda x: x.resize_(0),
    "data": lambda x: setattr(x, "data", torch.zeros(1)),
}


# ---- outcome shaping ----


def see_outcome(inputs, *, factor=1.0):
    SEEN.append(inputs)
    return OutcomeResult(rewards=inputs.data["rewards"].float() * factor)


def references(inputs, *, values, factor=1.0):
    """Shaped references as given by the configuration."""
    return OutcomeResult(inputs.data["rewards"].float() * factor, torch.tensor(values, dtype=torch.float32))


def wrong_outcome(inputs, *, wrong):
    return OutcomeResult(_wrong(inputs.data["rewards"].float(), wrong))


def wrong_references(inputs, *, wrong, n):
    return OutcomeResult(inputs.data["rewards"].float(), _wrong(torch.zeros(n), wrong))


def outcome_of_kind(inputs, *, kind):
    """A bare tensor, a mapping, a tuple, None, an object without rewards, or one that looks right."""
    x = inputs.data["rewards"].float()
    kinds = {
        "tensor": x,
        "mapping": {"rewards": x},
        "tuple": (x, None),
        "none": None,
        "no_rewards": SimpleNamespace(normalization_rewards=None),
        "look_alike": SimpleNamespace(rewards=x),
    }
    return kinds[kind]


def write_outcome(inputs, *, way, key="rewards"):
    WRITES[way](inputs.data[key])
    return OutcomeResult(torch.zeros(len(inputs.data["attention_mask"])))


def write_mapping(inputs):
    inputs.data["rewards"] = torch.zeros(1)


def write_field(inputs):
    inputs.data = {}


def write_meta(inputs):
    inputs.meta.traj_group_sizes.append(1)
    return OutcomeResult(inputs.data["rewards"].float())


def aliases_its_input(inputs):
    return OutcomeResult(inputs.data["rewards"])


# ---- estimators ----


def see_estimator(inputs):
    SEEN.append(inputs)
    total = inputs.outcome_rewards + inputs.kl_rewards + inputs.process_rewards
    return TemporalResult(total, total + 1, total + 2)


def numbers_its_cells(inputs):
    """Advantages 0, 1, 2, ... along each row."""
    x = inputs.outcome_rewards
    return TemporalResult(torch.arange(x.shape[1], dtype=x.dtype).expand_as(x), x, x)


def wrong_estimator(inputs, *, field, wrong):
    x = inputs.outcome_rewards
    return replace(TemporalResult(x, x, x), **{field: _wrong(x, wrong)})


def estimator_of_kind(inputs, *, kind):
    x = inputs.outcome_rewards
    kinds = {
        "tensor": x,
        "mapping": {"advantages": x, "returns": x, "total_rewards": x},
        "tuple": (x, x, x),
        "none": None,
        "no_total": SimpleNamespace(advantages=x, returns=x),
    }
    return kinds[kind]


def write_estimator(inputs, *, way, field):
    result = numbers_its_cells(inputs)
    WRITES[way](getattr(inputs, field))
    return result


def lambda_as_advantage(inputs, *, unit):
    """compute_gae_lambda's answer in every column."""
    gae_lambda = compute_gae_lambda(inputs, unit)
    SEEN.append(gae_lambda)
    x = inputs.outcome_rewards
    rows = torch.as_tensor(gae_lambda, dtype=x.dtype).reshape(-1, 1)
    return TemporalResult(rows.expand_as(x), x, x)


# ---- process shaping ----


def see_process(inputs):
    SEEN.append(inputs)
    return inputs.advantages * 1


def constant(inputs, *, value):
    return torch.full_like(inputs.advantages, value)


def wrong_process(inputs, *, wrong):
    return _wrong(inputs.advantages.clone(), wrong)


def process_bad_cell(inputs, *, column):
    out = inputs.advantages.clone()
    out[0, column] = torch.nan
    return out


def write_process(inputs, *, way, field):
    WRITES[way](getattr(inputs, field))
    return torch.zeros(2, 5)


def empties_its_list(inputs, *, steps):
    """Adds the first of its kwargs' list, and takes it off."""
    return inputs.advantages + steps.pop(0)


# ---- lambda functions ----


def see_lambda(context, *, value=0.5):
    SEEN.append(dict(context))
    return torch.full(context["timestep_lengths"].shape, value)


def wrong_lambda(context, *, wrong):
    return _wrong(torch.full(context["timestep_lengths"].shape, 0.5), wrong)


def write_lambda(context, *, way):
    WRITES[way](context["timestep_lengths"])
    return torch.full(context["turn_counts"].shape, 0.5)


def write_lambda_context(context):
    context["timestep_lengths"] = torch.zeros(1)
    return torch.full(context["turn_counts"].shape, 0.5)


# ---- the whole computation ----


def see_compute(inputs, *, extras=(), wrong=None, field=None):
    """Numbers by channel: advantages 1, returns 2, and so on; rewards are the data's. `field` gets what is `wrong`."""
    SEEN.append(inputs)
    ones = torch.ones(inputs.data["loss_mask"].shape)
    result = {
        "advantages": ones,
        "returns": ones * 2,
        "loss_mask": inputs.data["loss_mask"].float(),
        "logprobs": ones * -3,
        "rewards": inputs.data["rewards"].float(),
        "tot_rewards": ones * 4,
        "kl_rewards": ones * 5,
    }
    possible = {
        "input_token_loss_mask": inputs.data["loss_mask"],
        "is_truncated": torch.ones(len(ones)),
        "mopd_behavior_logprobs": ones * -6,
        "prox_logp": ones * -7,
        "ref_logp": ones * -8,
    }
    known = {name: possible.get(name, ones) for name in extras}
    if field in result:
        result[field] = _wrong(result[field], wrong)
    elif field is not None:
        known[field] = _wrong(possible[field], wrong)
    return AdvantageResult(**result, extras=known)


def mask_of_twos(inputs, *, field):
    result = see_compute(inputs)
    twos = torch.full(inputs.data["loss_mask"].shape, 2.0)
    if field == "loss_mask":
        return replace(result, loss_mask=twos)
    return replace(result, extras={field: twos[:, 0] if field == "is_truncated" else twos})


def compute_of_kind(inputs, *, kind):
    result = see_compute(inputs)
    kinds = {
        "tensor": result.advantages,
        "mapping": dict(vars(result)),
        "none": None,
        "no_kl_rewards": SimpleNamespace(**{k: v for k, v in vars(result).items() if k != "kl_rewards"}),
    }
    return kinds[kind]


def extras_of_kind(inputs, *, kind):
    kinds = {"list": [], "names": ["prox_logp"], "tensor": torch.ones(2, 3), "none": None}
    return replace(see_compute(inputs), extras=kinds[kind])


def write_compute(inputs, *, way, key):
    WRITES[way](inputs.data[key])
    return None


# ---- any slot ----


def raises(inputs):
    raise KeyError("the function's own words")
