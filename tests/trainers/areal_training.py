"""A small transformer on a CPU that learns to copy digits, trained by AReaL's real PPOActor: its advantages or ours.

    .venv-peers/bin/python tests/trainers/areal_training.py perf/areal_copy.svg     # trains both, draws their rewards

A prompt is two or three digits and a separator; the answer is the same digits. The reward is the share of them that is
right. GRPO: eight answers to each of eight prompts, rewards normalised by prompt.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.utils.data import batched_call
from torch import Tensor, nn

from compiled_adv.integrations import areal

DIGITS, SEPARATOR, PAD = 6, 6, 7
VOCABULARY, LONGEST, WIDTH = 8, 7, 48
PROMPTS, ANSWERS = 8, 8

Rollouts = list[dict[str, Any]]


class Transformer(nn.Module):
    """One causal block over at most LONGEST tokens: logits [B,T,VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        future_TT = torch.ones(length, length).triu(1).bool()
        x = self.tokens(ids_BT) + self.places.weight[:length]
        return self.head(self.block(x, src_mask=future_TT))


class Engine:
    """What a PPOActor asks of its engine: one process, no micro-batches."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer()
        # Its eps is far above rounding, so a gradient of 0 but for rounding moves nothing.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3, eps=1e-4)
        self.version = 0

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def get_version(self) -> int:
        return self.version

    @torch.no_grad()
    def forward(self, input_: dict[str, Any], aggregate_fn: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return aggregate_fn([self._logprobs(input_["input_ids"])[0]])

    def train_batch(self, input_: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        """One step of the optimizer on one minibatch."""
        assert loss_weight_fn(input_) > 0
        self.optimizer.zero_grad()
        loss = loss_fn(*self._logprobs(input_["input_ids"]), input_)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        return {"grad_norm": float(norm), "loss": float(loss.detach())}

    def _logprobs(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Of each next token, and the entropy there; [B,T], next-token aligned."""
        log_BTV = self.model(ids_BT).log_softmax(-1)
        next_BT = ids_BT.roll(-1, dims=1)
        return log_BTV.gather(-1, next_BT[..., None])[..., 0], -(log_BTV.exp() * log_BTV).sum(-1)


@torch.no_grad()
def answers_to(prompt: list[int], model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """ANSWERS sampled ones, as one of AReaL's trajectories."""
    start, length = len(prompt) + 1, 2 * len(prompt) + 1
    ids_BT = torch.tensor([[*prompt, SEPARATOR]]).repeat(ANSWERS, 1)
    logprobs_BT = torch.zeros(ANSWERS, length)
    for t in range(start, length):
        log_BV = model(ids_BT)[:, -1].log_softmax(-1)
        drawn_B1 = torch.multinomial(log_BV.exp(), 1, generator=generator)
        logprobs_BT[:, t] = log_BV.gather(-1, drawn_B1)[:, 0]
        ids_BT = torch.cat([ids_BT, drawn_B1], 1)
    generated_BT = (torch.arange(length) >= start).long().repeat(ANSWERS, 1)
    right_BN = ids_BT[:, start:] == torch.tensor(prompt)
    return {
        "input_ids": ids_BT,
        "attention_mask": torch.ones_like(ids_BT),
        "loss_mask": generated_BT,
        "logprobs": logprobs_BT,
        "rewards": right_BN.float().mean(1),
        "versions": torch.where(generated_BT > 0, 0, -1),
    }


def rolled_out(model: nn.Module, generator: torch.Generator) -> Rollouts:
    """One dict per prompt; two and three digits, so there is padding."""
    lengths = [2 + i % 2 for i in range(PROMPTS)]
    prompts = [torch.randint(0, DIGITS, (n,), generator=generator).tolist() for n in lengths]
    return [answers_to(prompt, model, generator) for prompt in prompts]


@dataclass
class Run:
    """What a training run leaves behind, step by step."""

    rollouts: list[Rollouts] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)  # largest relative difference between both advantages of a batch
    stats: list[dict[str, float]] = field(default_factory=list)  # what AReaL logged
    parameters: list[dict[str, Tensor]] = field(default_factory=list)


OWN = vars(PPOActor)["_compute_advantages"]
CHANNELS = ("advantages", "returns", "kl_rewards", "tot_rewards", "loss_mask", "logprobs", "prox_logp")


def train(steps: int, *, ours: bool, seed: int = 0, replay: list[Rollouts] | None = None) -> Run:
    """Train from the same start; on the model's own rollouts, or on given ones."""
    engine, generator, run = Engine(seed), torch.Generator().manual_seed(seed), Run()
    norm = NormConfig(mean_level="group", std_level="group", group_size=ANSWERS)
    names = {"experiment_name": "copy", "trial_name": "copy"}
    settings = {"kl_ctl": 0.0, "reward_norm": norm, "ppo_n_minibatches": 2}
    actor = PPOActor(PPOActorConfig(**names, **settings), engine)
    for step in range(steps):
        rollouts = rolled_out(engine.model, generator) if replay is None else replay[step]
        run.rollouts.append(copied(rollouts))
        run.rewards.append(float(torch.cat([t["rewards"] for t in rollouts]).mean()))
        theirs = batched_call(functools.partial(OWN, actor), copied(rollouts))
        areal.enable()
        here = actor.compute_advantages(copied(rollouts))
        areal.disable()
        run.apart.append(max(_apart(a[name], b[name]) for a, b in zip(here, theirs, strict=True) for name in CHANNELS))
        actor.ppo_update(here if ours else theirs)
        run.stats.append(stats_tracker.export_all())
        run.parameters.append({name: x.detach().clone() for name, x in engine.model.named_parameters()})
    return run


def copied(rollouts: Rollouts) -> Rollouts:
    return [{name: x.clone() for name, x in t.items()} for t in rollouts]


def _apart(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs() / (1 + want.abs())).max())


# ---- the plot ----


def smooth(values: list[float], over: int = 10) -> list[float]:
    return [sum(values[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(values))]


TITLE = "Copying digits: share of digits that are right, mean of 10 steps"


def drawn(curves: dict[str, list[float]]) -> str:
    """An SVG of rewards from 0 to 1 over steps."""
    left, top, width, height = 56, 44, 560, 220
    bottom, steps = top + height, max(map(len, curves.values()))
    # The second lies over the first: thin on broad lets both be seen.
    looks = ['stroke="#f0b060" stroke-width="8"', 'stroke="#1f4e9c" stroke-width="2"']
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="320" viewBox="0 0 640 320" fill="#333" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12"><rect width="640" height="320" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14" font-weight="bold">{TITLE}</text>',
    ]
    for i in range(6):
        y = bottom - height * i / 5
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{"#e4e4e4" if i else "#888"}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{20 * i}%</text>')
    for step in range(0, steps + 1, 20):
        x = left + width * step / steps
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    for n, ((name, values), look) in enumerate(zip(curves.items(), looks, strict=True)):
        points = " ".join(f"{left + width * i / steps:.1f},{bottom - height * x:.1f}" for i, x in enumerate(values, 1))
        line = f'fill="none" stroke-linecap="round" stroke-linejoin="round" {look}'
        x, y = left + 330, bottom - 70 + 22 * n
        parts.append(f'<polyline points="{points}" {line}/>')
        parts.append(f'<path d="M{x} {y - 4}h28" {line}/><text x="{x + 40}" y="{y}">{name}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 40}" text-anchor="middle">step</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {"with AReaL's own advantages": train(80, ours=False), "with compiled_adv's": train(80, ours=True)}
    Path(sys.argv[1]).write_text(drawn({name: smooth(run.rewards) for name, run in runs.items()}))
    for name, run in runs.items():
        print(f"{name}: reward {sum(run.rewards[:10]) / 10:.3f} -> {sum(run.rewards[-10:]) / 10:.3f}")
