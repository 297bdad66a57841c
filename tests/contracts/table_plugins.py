"""The functions of test_plugin_table.py, by dotted path. All but the outcome ones stand in the process slot."""

import functools
import logging
import random
import time
from typing import Any

import numpy as np
import torch

import compiled_adv
from compiled_adv import OutcomeResult

SCALE = 2.0
STEPS = [0]
CALLS: list[Any] = []


# ---- what torch can trace ----


def pure(inputs, *, factor=2.0):
    return inputs.advantages * inputs.loss_mask * factor


@compiled_adv.pad_safe
def safe(inputs, *, factor=2.0):
    return pure(inputs, factor=factor)


def batch_mean(inputs):
    return inputs.advantages - inputs.advantages.mean()


@compiled_adv.pad_safe
def false_claim(inputs):
    return inputs.advantages - inputs.advantages.mean()


def by_mask_on_a_copy(inputs):
    x = inputs.advantages.clone()
    x[inputs.loss_mask > 0] = 1.0
    return x


def in_numpy(inputs):
    return torch.from_numpy(np.tanh(inputs.advantages.numpy()))


def in_float64(inputs):
    return inputs.advantages.double() * 2


def its_input(inputs):
    return inputs.advantages


@compiled_adv.pad_safe
def by_config(inputs):
    return inputs.advantages * inputs.config.discount


@compiled_adv.pad_safe
def by_global(inputs):
    return inputs.advantages * SCALE


def _closing_over(factor):
    def function(inputs):
        return inputs.advantages * factor

    return function


closure = compiled_adv.pad_safe(_closing_over(3.0))


def _logged(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


decorated = _logged(safe)


class Scaled:
    """A class is refused; a static method of it and an instance of it are not."""

    def __init__(self, factor=2.0):
        self.factor = factor

    def __call__(self, inputs):
        return inputs.advantages * self.factor

    @staticmethod
    def method(inputs):
        return inputs.advantages * 2.0


instance = Scaled(4.0)


@compiled_adv.pad_safe
@compiled_adv.per_trajectory
def one_row(advantages, loss_mask):
    return advantages - (advantages * loss_mask).sum() / loss_mask.sum().clamp(min=1)


# ---- what torch cannot trace, or does not trace right ----


def token_loop(inputs):
    run = torch.zeros(len(inputs.advantages))
    out = torch.zeros_like(inputs.advantages)
    for t in reversed(range(inputs.advantages.shape[1])):
        run = inputs.advantages[:, t] + 0.5 * run
        out[:, t] = run
    return out


def python_lists(inputs):
    return torch.tensor([[x * 2 for x in row] for row in inputs.advantages.tolist()])


def item(inputs):
    return inputs.advantages * inputs.advantages.abs().max().item()


def branch(inputs):
    return inputs.advantages * 2 if inputs.advantages.sum() > 0 else inputs.advantages * 3


def compressed(inputs):
    return inputs.advantages - inputs.advantages[inputs.loss_mask > 0].mean()


def torch_random(inputs):
    return inputs.advantages + torch.rand_like(inputs.advantages)


def python_random(inputs):
    return inputs.advantages * random.random()


def numpy_random(inputs):
    return inputs.advantages * float(np.random.rand())


def counter(inputs):
    STEPS[0] += 1
    return inputs.advantages * STEPS[0]


def appends(inputs):
    CALLS.append(inputs.advantages)
    return inputs.advantages * len(CALLS)


def prints(inputs):
    print("advantages:", tuple(inputs.advantages.shape))
    return inputs.advantages * 1


def logs(inputs):
    logging.getLogger(__name__).debug("advantages %s", tuple(inputs.advantages.shape))
    return inputs.advantages * 1


def slow(inputs):
    time.sleep(0.02)
    return inputs.advantages * 1


@functools.lru_cache(maxsize=1)
def remembered(inputs):
    return inputs.advantages * 2


def empties_its_kwargs(inputs, *, steps):
    return inputs.advantages * steps.pop()


# ---- what breaks the contract ----


def writes(inputs):
    inputs.advantages.add_(1)
    return inputs.advantages * 1


def writes_through_a_view(inputs):
    inputs.advantages[0].mul_(2)
    return inputs.advantages * 1


def writes_through_numpy(inputs):
    inputs.loss_mask.numpy()[...] = 0
    return inputs.advantages * 1


def raises(inputs):
    raise KeyError("the function's own words")


def raises_on_nan(inputs):
    """Only a number tells whether."""
    if not torch.isfinite(inputs.advantages).all():
        raise ValueError("not finite")
    return inputs.advantages * 1


def wrong_shape(inputs):
    return inputs.advantages[:, :-1]


def wrong_dtype(inputs):
    return inputs.advantages.long()


def wrong_device(inputs):
    return inputs.advantages.to("meta")


def no_tensor(inputs):
    return inputs.advantages.tolist()


def nothing(inputs):
    return None


def not_finite(inputs):
    return inputs.advantages / 0


@compiled_adv.pad_safe
def not_finite_where_zero(inputs):
    """Infinite where an advantage is 0."""
    return 1 / inputs.advantages


async def coroutine(inputs):
    return inputs.advantages * 1


def generator(inputs):
    yield inputs.advantages * 1


# ---- outcome functions ----


def reads_lists(inputs):
    """Each reward by the size of its prompt."""
    sizes = [size for size in inputs.meta.traj_group_sizes for _ in range(size)]
    return OutcomeResult(inputs.data["rewards"] / torch.tensor(sizes))


def reads_strings(inputs):
    return OutcomeResult(inputs.data["rewards"] * torch.tensor([float(len(task)) for task in inputs.data["tasks"]]))


@compiled_adv.pad_safe
def reads_tokens(inputs, *, weight):
    """A key of the trainer's own, and one of ours."""
    lengths = inputs.data["loss_mask"].sum(1)
    return OutcomeResult(inputs.data["rewards"] + weight * lengths + inputs.data["scores"].sum(1))


@compiled_adv.per_group
def best_of_prompt(rewards, mask):
    return rewards - torch.where(mask, rewards, -torch.inf).max()


# ---- a replacement of the whole computation ----


def _everything(inputs):
    mask = torch.nn.functional.pad(inputs.data["loss_mask"][:, 1:], (0, 1)).float()
    advantages = inputs.data["rewards"][:, None] * mask * (1 + inputs.gvpo_zero_penalty)
    logprobs = torch.nn.functional.pad(inputs.data["logprobs"][:, 1:], (0, 1)) * mask
    kinds = {"is_truncated": inputs.data["is_truncated"], "input_token_loss_mask": inputs.data["loss_mask"]}
    zeros = torch.zeros_like(advantages)
    return compiled_adv.AdvantageResult(
        advantages, advantages, mask, logprobs, inputs.data["rewards"], advantages, zeros, kinds
    )


def everything(inputs):
    return _everything(inputs)


@compiled_adv.pad_safe
def everything_safe(inputs):
    return _everything(inputs)


def everything_and_prints(inputs):
    print("everything")
    return _everything(inputs)
