"""Rows of 100,000 tokens against a plain Python loop: no power underflows, none is taken from the start of the row."""

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_adv
from compiled_adv.errors import NonFinite
from tests.contracts.small import Runner

TOKENS = 100_000
BACKENDS = ("eager",)  # the reference is the same loop
FACTORS = [(0.5, 1.0), (0.5, 1.25), (0.8, 1.25), (1.0, 1.0), (0.999, 0.95), (1.0, -0.9), (0.5, 0.0)]

pytestmark = pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def batch_of(own_BT: Tensor, rewards_BT: Tensor, values_BT: Tensor, **more: Any) -> dict[str, Any]:
    """Rows that fill the width, the first one truncated. The reward of each action enters as its KL."""
    rows = len(own_BT)
    return {
        "input_ids": torch.zeros_like(own_BT, dtype=torch.int64),
        "attention_mask": torch.ones_like(own_BT),
        "loss_mask": own_BT,
        "rewards": torch.zeros(rows),
        "logprobs": -rewards_BT,
        "ref_logp": torch.zeros_like(rewards_BT),
        "values": values_BT,
        "is_truncated": torch.arange(rows) == 0,
    } | more


def random_batch(seed: int = 0) -> dict[str, Any]:
    """Three rows: all generated, a tenth of the tokens generated, and runs of tool tokens up to thousands long."""
    generator = torch.Generator().manual_seed(seed)
    own_BT = torch.ones(3, TOKENS, dtype=torch.bool)
    own_BT[1] = torch.rand(TOKENS, generator=generator) < 0.1
    own_BT[2] = (torch.rand(TOKENS // 2500, generator=generator) < 0.5).repeat_interleave(2500)
    own_BT[:, 0] = False
    rewards_BT, values_BT = torch.randn(2, 3, TOKENS, generator=generator).clamp(-5, 5)
    return batch_of(own_BT, rewards_BT, values_BT)


def loop(out: dict[str, Tensor], batch: dict[str, Any], discount: float, gae_lambda: float) -> Tensor:
    """Advantages by the formula of semantics.md, one Python float after another."""
    advantages = torch.zeros(batch["values"].shape, dtype=torch.float64)
    for b, mask in enumerate(out["loss_mask"].bool().tolist()):
        rewards, values = out["tot_rewards"][b].tolist(), batch["values"][b].tolist()
        after, running, row = values[-1] if batch["is_truncated"][b] else 0.0, 0.0, [0.0] * len(mask)
        for t in range(len(mask) - 2, -1, -1):
            if mask[t]:
                running = rewards[t] + discount * after - values[t] + discount * gae_lambda * running
                after = values[t]
            row[t] = running
        advantages[b] = torch.tensor(row, dtype=torch.float64)
    return advantages


def assert_near(got: Tensor, want: Tensor) -> None:
    wrong = ~((got.double() - want).abs() <= 1e-5 * (1 + want.abs()))
    assert not wrong.any(), (wrong.nonzero()[:3], got[wrong][:3], want[wrong][:3])


@pytest.mark.parametrize(("discount", "gae_lambda"), FACTORS)
def test_long_rows_with_gaps_equal_the_loop(run: Runner, discount: float, gae_lambda: float) -> None:
    batch = random_batch()
    out = run(batch, {"discount": discount, "gae_lambda": gae_lambda, "kl_ctl": 1.0})
    want = loop(out, batch, discount, gae_lambda)
    assert_near(out["advantages"], want)
    assert_near(out["returns"], want + batch["values"].double())


@pytest.mark.parametrize(
    ("discount", "gae_lambda"), [(0.5, 1.0), (0.5, 1.25), (0.8, 1.25), (1.0, 0.99), (1.0, 0.99999), (0.99999, 1.0)]
)
def test_an_outcome_decays_by_powers_of_the_distance_in_actions(
    run: Runner, discount: float, gae_lambda: float
) -> None:
    own_BT = torch.ones(1, TOKENS, dtype=torch.bool)
    own_BT[0, 0] = own_BT[0, 50_000:90_000] = False
    batch = batch_of(own_BT, torch.zeros(1, TOKENS), torch.zeros(1, TOKENS), rewards=torch.ones(1))
    got = run(batch, {"discount": discount, "gae_lambda": gae_lambda})["advantages"][0, :-1]
    actions = own_BT[0, 1:]
    distance = actions.sum() - actions.cumsum(0)
    want = [(discount * gae_lambda) ** n for n in distance.tolist()]
    torch.testing.assert_close(got[actions].double(), torch.tensor(want).double()[actions], rtol=1e-6, atol=1e-44)


def test_a_gap_of_100_000_tokens_is_one_step(run: Runner) -> None:
    own_BT = torch.zeros(1, TOKENS, dtype=torch.bool)
    own_BT[0, [1, -1]] = True
    batch = batch_of(own_BT, torch.zeros(1, TOKENS), torch.zeros(1, TOKENS), rewards=torch.ones(1))
    got = run(batch, {"discount": 0.5, "gae_lambda": 0.5})["advantages"][0]
    assert got[0] == 0.25 and (got[1:-1] == 1).all()


def test_a_growing_power_of_nothing_is_nothing(run: Runner) -> None:
    # 1.25 ** 100_000 is beyond every float, but only the first hundred actions have anything to carry back
    batch = random_batch()
    for key in ("logprobs", "values"):
        batch[key][:, 100:] = 0
    out = run(batch, {"gae_lambda": 1.25, "kl_ctl": 1.0})
    assert_near(out["advantages"], loop(out, batch, 1.0, 1.25))


def test_a_power_that_overflows_is_an_error_and_the_next_call_works(run: Runner) -> None:
    batch = random_batch()
    compute = run.build({"gae_lambda": 1.25, "kl_ctl": 1.0})
    with pytest.raises(NonFinite):
        compute(batch)
    short = {key: x[:, :64] if x.ndim == 2 else x for key, x in batch.items()}
    out = compute(short)
    assert_near(out["advantages"], loop(out, short, 1.0, 1.25))


@pytest.mark.parametrize("tokens_per_turn", [1, 3, 20_000])
@pytest.mark.parametrize(("discount", "gae_lambda"), [(0.5, 1.25), (0.99, 0.95)])
def test_long_rows_of_turns_equal_the_loop(
    run: Runner, tokens_per_turn: int, discount: float, gae_lambda: float
) -> None:
    batch = random_batch()
    batch["turn_ids"] = (torch.arange(TOKENS) // tokens_per_turn).expand(3, TOKENS)
    batch["rewards"] = torch.tensor([1.0, -2.0, 3.0])
    out = run(batch, {"gae_timestep_unit": "turn", "discount": discount, "gae_lambda": gae_lambda})
    for b in range(3):
        columns = out["loss_mask"][b].nonzero().flatten()
        ids = batch["turn_ids"][b, columns + 1]
        first = torch.cat([torch.ones(1, dtype=torch.bool), ids[1:] != ids[:-1]])
        values = batch["values"][b, columns[first]].double().tolist()
        rewards = [0.0] * len(values)
        if columns[-1] == TOKENS - 2:  # the column of the outcome
            rewards[-1] = batch["rewards"][b].item()
        after, running, runs = batch["values"][b, -1].item() if b == 0 else 0.0, 0.0, []
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            running = reward + discount * after - value + discount * gae_lambda * running
            after = value
            runs.append(running)
        want = torch.tensor(runs[::-1], dtype=torch.float64)[first.cumsum(0) - 1]
        assert_near(out["advantages"][b, columns], want)


def test_lambdas_of_long_rows_differ_row_by_row(run: Runner) -> None:
    batch = random_batch()
    vapo = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.001}}
    out = run(batch, vapo | {"kl_ctl": 1.0})
    for b in range(3):
        length = int(out["loss_mask"][b].sum())
        row = {key: x[b : b + 1] for key, x in batch.items()}
        seen = {key: out[key][b : b + 1] for key in ("loss_mask", "tot_rewards")}
        want = loop(seen, row, 1.0, torch.tensor(1 - 1000 / length).item())  # a function's lambda is float32
        assert_near(out["advantages"][b : b + 1], want)


def test_the_reference_loops_to_the_same_numbers() -> None:
    """The loop here against the oracle, on the first part of the same rows."""
    batch = {key: x[:, :500] if x.ndim == 2 else x for key, x in random_batch().items()}
    actor = {"discount": 0.8, "gae_lambda": 1.25, "kl_ctl": 1.0, "advantage": {"backend": "reference"}}
    out = compiled_adv.build({"actor": actor})(batch)
    assert_near(out["advantages"], loop(out, batch, 0.8, 1.25))
