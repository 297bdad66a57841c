"""The same batch in other clothes: dtypes, strides, grad, modes; results must not change."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

FLOATS = ("logprobs", "token_rewards", "prox_logp", "ref_logp", "values", "rewards", "mopd_teacher_logp_sum")
MASKS = ("attention_mask", "loss_mask", "is_truncated")


def strided(x: Tensor) -> Tensor:
    """The same numbers as a view into a larger storage, contiguous in no dimension."""
    big = torch.full([2 * n for n in reversed(x.shape)], 1, dtype=x.dtype)
    view = big[tuple(slice(None, None, 2) for _ in x.shape)]
    return (view.T if x.ndim == 2 else view).copy_(x)


def cast(keys: tuple[str, ...], dtype: torch.dtype) -> Any:
    return lambda batch: batch | {key: batch[key].to(dtype) for key in keys if key in batch}


def each(change: Any) -> Any:
    return lambda batch: {key: change(x) for key, x in batch.items()}


def as_they_are(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def requiring_grad(batch: dict[str, Any]) -> dict[str, Any]:
    leaves = each(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x)(batch)
    return leaves | {"logprobs": leaves["logprobs"] * 1}  # one with a history


def inference_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return each(torch.clone)(batch)


class float64_by_default:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


# name -> (the batch in another guise, the state that torch is in). The cases' numbers are exact in every dtype here.
FLAVOURS = {
    "non-contiguous": (each(strided), nullcontext),
    "float64": (cast(FLOATS, torch.float64), nullcontext),
    "bfloat16": (cast(FLOATS, torch.bfloat16), nullcontext),
    "float16": (cast(FLOATS, torch.float16), nullcontext),
    **{
        f"{str(dtype).removeprefix('torch.')} masks": (cast(MASKS, dtype), nullcontext)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
        + (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    },
    **{
        f"{str(dtype).removeprefix('torch.')} turn ids": (cast(("turn_ids",), dtype), nullcontext)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    },
    "requires grad": (requiring_grad, torch.enable_grad),
    "inference tensors": (inference_tensors, nullcontext),
    "inference mode": (as_they_are, torch.inference_mode),
    "inference tensors in inference mode": (inference_tensors, torch.inference_mode),
    "no grad": (as_they_are, torch.no_grad),
    "autocast": (as_they_are, lambda: torch.autocast("cpu", torch.bfloat16)),
    "float64 by default": (as_they_are, float64_by_default),
}
