"""Takes what a user's function is to be given; gives it as named tensors, with what else a graph of it depends on.

`Form` is of one function's inputs, `Rollout` of a batch that a function in the Program reads itself. Each can be blank:
of any size, and of padding alone.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from compiled_adv.batch import TrajBatchMeta, is_wrapper
from compiled_adv.bucket import rung
from compiled_adv.channel import OPTIONAL
from compiled_adv.inductor import Captured, capture
from compiled_adv.pipeline import Node
from compiled_adv.plugins import ProgramData, ProgramMeta, prompts_of
from compiled_adv.resolve import Plugin
from compiled_adv.stages.plugin import PluginStage

# Two small batches: a graph that is another one for the second grows with the batch.
SMALL = ((8, 16), (16, 24))

BLANK_META = TrajBatchMeta(1, [SMALL[0][0]], [SMALL[0][1]], None)

PER_ROW = ("rewards", "references", "bootstrap_values", "is_truncated", "turn_counts", "gae_lambda")


@dataclass(frozen=True)
class Form:
    """The inputs of a function as tensors by name, and what else of them a graph may depend on."""

    stage: PluginStage
    tensors: dict[str, Tensor]
    kind: Callable[..., Any] | None = None  # the class of the inputs; None: a mapping
    constant: Mapping[str, Any] = field(default_factory=dict)  # its fields that are no tensors
    reads_rollout: bool = False
    meta: bool = False  # whether there is metadata
    hidden: tuple[str, ...] = ()  # keys of the rollout that are no tensor of its rows and tokens
    largest: int = 0  # rows of the largest prompt, for a function of one prompt

    @property
    def signature(self) -> Hashable:
        kinds = tuple((name, x.dtype, x.ndim) for name, x in self.tensors.items())
        return kinds, self.hidden, self.meta, self.largest

    @property
    def small(self) -> "Form":
        """The same without the tensors of a batch."""
        return replace(self, tensors=self.sized(*SMALL[0]))

    def sized(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """Tensors of this form and another size: zeros, as padding holds."""
        sizes = (rows, tokens)
        return {name: x if x.ndim == 0 else x.new_full(sizes[: x.ndim], _pad(name)) for name, x in self.tensors.items()}

    def padded(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """The tensors with so much padding."""
        more = (rows, tokens)
        padded = {}
        for name, x in self.tensors.items():
            padded[name] = x.new_full([n + m for n, m in zip(x.shape, more, strict=False)], _pad(name))
            padded[name][tuple(slice(size) for size in x.shape)] = x
        return padded

    def function(self, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
        """The user's function of these tensors, giving the parts of its result. Torch traces what is in here."""
        fn, kwargs, stage = self.stage.plugin.fn, self.stage.plugin.kwargs, self.stage
        kind, constant, reads_rollout, has_meta, largest = (
            self.kind,
            self.constant,
            self.reads_rollout,
            self.meta,
            self.largest,
        )
        keys = [name.removeprefix("data:") for name in names if name.startswith("data:")]
        hidden = (*self.hidden, *(k[5:] for k in self.tensors if k.startswith("data:") and k not in names))

        def run(*tensors: Tensor) -> dict[str, Any]:
            given: dict[str, Any] = dict(zip(names, tensors, strict=True))
            prompt_B = given.pop("prompt", None)
            rollout = {key: given.pop(f"data:{key}") for key in keys}
            if kind is None:
                return stage.parts(fn(given, **kwargs))
            if reads_rollout:
                meta = ProgramMeta(prompt_B, largest) if has_meta or largest else None
                given |= {"data": ProgramData(rollout, hidden), "meta": meta}
            return stage.parts(fn(kind(**constant, **given), **kwargs))

        return run

    def captured(self, tensors: Mapping[str, Tensor]) -> Captured:
        names = tuple(tensors)
        return capture(self.function(names), tuple(tensors.values()), names)


def form_of(stage: PluginStage, inputs: Any) -> Form:
    """The form of a function's inputs."""
    if isinstance(inputs, Mapping):
        return Form(stage, dict(inputs))
    tensors: dict[str, Tensor] = {}
    constant: dict[str, Any] = {}
    hidden: tuple[str, ...] = ()
    largest = 0
    for name in (f.name for f in fields(inputs)):
        value = getattr(inputs, name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name.startswith("gvpo_"):  # they change from call to call: as numbers they would be constants
            tensors[name] = torch.tensor(value, dtype=torch.float64)
        elif name == "data":
            rollout, hidden = tensors_of(value)
            tensors |= {f"data:{key}": x for key, x in rollout.items()}
        elif name != "meta":
            constant[name] = value
    meta = getattr(inputs, "meta", None)
    if by_prompt(stage.plugin):
        prompt_B, _, largest = prompts_of(meta, stage.plugin.kwargs.get("group_size"), inputs.data["rewards"])
        tensors["prompt"] = prompt_B
        largest = _bound(largest, meta)
    return Form(stage, tensors, type(inputs), constant, hasattr(inputs, "data"), meta is not None, hidden, largest)


def tensors_of(data: Mapping[str, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors of a rollout's rows, or rows and tokens, and the keys of the rest."""
    mask = data["loss_mask"]

    def fits(x: Any) -> bool:
        plain = isinstance(x, Tensor) and x.layout == torch.strided and not is_wrapper(x)
        plain = plain and not (x.is_quantized or x.is_complex())
        return plain and x.device == mask.device and 0 < x.ndim < 3 and x.shape == mask.shape[: x.ndim]

    tensors = {key: x.detach() for key, x in data.items() if fits(x)}
    return tensors, tuple(key for key in data if key not in tensors)


@dataclass(frozen=True)
class Rollout:
    """What a Program with a function of the rollout itself depends on beside the channels of a batch."""

    kinds: tuple[tuple[str, torch.dtype, int], ...]  # key, dtype and dims of each tensor
    hidden: tuple[str, ...]
    meta: bool
    explicit: bool  # the metadata gives references
    largest: int  # rows of the largest prompt, for a function of one prompt

    def blank(self, rows: int, tokens: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """Tensors of these kinds that hold padding alone."""
        sizes = (rows, tokens)
        return {key: torch.full(sizes[:ndim], _pad(key), dtype=dtype, device=device) for key, dtype, ndim in self.kinds}


def rollout_of(plugin: Plugin, data: Mapping[str, Any], meta: TrajBatchMeta | None) -> Rollout:
    tensors, hidden = tensors_of(data)
    kinds = tuple(sorted(((key, x.dtype, x.ndim) for key, x in tensors.items()), key=lambda kind: kind[0]))
    largest = 0
    if by_prompt(plugin):
        largest = _bound(prompts_of(meta, plugin.kwargs.get("group_size"), data["rewards"])[2], meta)
    groups = (meta and meta.rollout_groups) or ()
    explicit = any(reference is not None for group in groups if group for reference in group.rewards)
    return Rollout(kinds, hidden, meta is not None, explicit, largest)


def blank_rollout(channels: Iterable[str], plugin: Plugin | None) -> tuple[dict[str, Tensor], TrajBatchMeta | None]:
    """A rollout with these optional channels, in the usual dtypes, where no batch is there to look at; with metadata
    where the function needs it."""
    rows, tokens = SMALL[0]
    named = dict.fromkeys(("logprobs", *channels), torch.float32)
    named |= {"input_ids": torch.int64, "loss_mask": torch.int64, "attention_mask": torch.bool}
    named |= {key: torch.int64 for key in ("turn_ids",) if key in named}
    data = {key: torch.zeros(rows, tokens, dtype=dtype) for key, dtype in named.items()}
    data |= {"rewards": torch.zeros(rows), "is_truncated": torch.zeros(rows, dtype=torch.bool)}
    needed = plugin is not None and by_prompt(plugin) and plugin.kwargs.get("group_size") is None
    return data, BLANK_META if needed else None


def _bound(largest: int, meta: TrajBatchMeta | None) -> int:
    """A bound of a prompt's rows that few batches change."""
    return largest if meta is None else rung(largest, 1)


def by_prompt(plugin: Plugin) -> bool:
    """Whether it is a function of one prompt."""
    return getattr(plugin.fn, "by_prompt", False) is True


def blank_inputs(node: Node, rollout: Rollout | None, config: Any) -> Any:
    """What a user's function would get for a batch of 8 rows that hold padding alone."""
    stage = node.stage
    assert isinstance(stage, PluginStage)
    present = {name.removesuffix("?") for name, v in zip(stage.reads, node.reads, strict=True) if v is not None}
    rows, tokens = SMALL[0]

    def channel(name: str) -> Tensor | None:
        if name not in present:
            return None
        dtype = torch.int64 if name == "aligned_turn_ids" else torch.float32
        return torch.zeros(3 if name == "gvpo" else (rows,) if name in PER_ROW else (rows, tokens), dtype=dtype)

    if rollout is None:
        return stage.inputs(channel, *blank_rollout(OPTIONAL, stage.plugin), config)
    known = rollout.blank(rows, tokens) | dict.fromkeys(rollout.hidden)
    return stage.inputs(channel, known, BLANK_META if rollout.meta else None, config)


def _pad(name: str) -> int:
    return -1 if name.endswith("turn_ids") or name == "prompt" else 0
