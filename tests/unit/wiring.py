"""Takes a configuration and a batch; gives its Pipeline and what was admitted, as the compiler wires them."""

from typing import Any

import torch

from compiled_adv.admit import Admitted, Call, admit
from compiled_adv.pipeline import Node, Pipeline, wire
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import load_config
from compiled_adv.stage import Stage

PLUGINS = "tests.contracts.plugins_under_test."
OPTIONAL = ("prox_logp", "ref_logp", "values", "token_rewards", "turn_ids")

# Every step of the default computation has something to do.
EVERYTHING: dict[str, Any] = {
    "kl_ctl": 0.5,
    "recompute_logprob": True,
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 0.5,
    "max_new_tokens": 3,
    "reward_norm": {"mean_level": "group", "group_size": 2},
    "adv_norm": {"mean_level": "batch"},
}


def a_batch(*without: str) -> dict[str, Any]:
    """Four rows of six columns with every optional channel, less those named."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 4, 6
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 0, 0, 0, 0]])
    batch: dict[str, Any] = {
        "input_ids": torch.zeros(rows, tokens, dtype=torch.int64),
        "attention_mask": attention,
        "loss_mask": loss_mask,
        "rewards": torch.tensor([1.0, 0.0, -0.5, 0.25]),
        "is_truncated": torch.tensor([False, False, True, False]),
        "turn_ids": torch.where(loss_mask > 0, loss_mask.cumsum(1) // 2, -1),
        "token_rewards": torch.full((rows, tokens), 0.5),
    }
    for key in ("logprobs", "prox_logp", "ref_logp", "values"):
        batch[key] = torch.randn(rows, tokens, generator=generator)
    return {key: x for key, x in batch.items() if key not in without}


def wired(
    actor: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    mode: str = "additive",
    mopd: bool = False,
    across_ranks: bool = False,
) -> tuple[Pipeline, Admitted]:
    spec = load_config({"actor": actor or {}})
    resolved = resolve_spec(spec)
    admitted = admit(a_batch() if batch is None else batch, None, Call(mode), spec, resolved)
    channels = frozenset(admitted.channels)
    return wire(spec, resolved, channels, mode, mopd=mopd, across_ranks=across_ranks), admitted


def plugin(slot: str, name: str, **kwargs: Any) -> dict[str, Any]:
    return {slot: {"implementation": PLUGINS + name, "kwargs": kwargs}}


def kinds(pipeline: Pipeline) -> set[type[Stage]]:
    return {type(node.stage) for node in pipeline.nodes}


def find(pipeline: Pipeline, kind: type[Stage]) -> Node:
    """The first node of a class."""
    return next(node for node in pipeline.nodes if isinstance(node.stage, kind))


def all_stages(root: type[Stage] = Stage) -> list[type[Stage]]:
    """Every stage class of ours, from all modules of stages/."""
    import importlib
    import pkgutil

    import compiled_adv.stages as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    found = []
    for kind in root.__subclasses__():
        found += [kind] * kind.__module__.startswith("compiled_adv.") + all_stages(kind)
    return list(dict.fromkeys(found))


# ---- stages of a few lines, for graphs drawn by hand ----


class Double(Stage):
    """b = 2 a."""

    reads = ("a",)
    writes = ("b",)

    factor: float = 2.0

    def forward(self, a):
        return a * self.factor


class Split(Stage):
    """Two parts of b, where c is optional."""

    reads = ("b", "c?")
    writes = ("d", "e")

    def forward(self, b, c):
        return b + 1, b - 1 if c is None else b - c


class Watch(Stage):
    """Flags rows of d that are above 5."""

    reads = ("d",)
    flags = ("large",)

    def forward(self, d):
        return d > 5


DOUBLE = Node("Double", Double(), ("a",), ("b",))
SPLIT = Node("Split", Split(), ("b", None), ("d", "e"))
WATCH = Node("Watch", Watch(), ("d",), (), ("flag:large",))
SMALL = Pipeline((DOUBLE, SPLIT, WATCH), ("a",), (("d", "d"), ("e", "e")))
