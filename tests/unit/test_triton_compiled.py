"""The GPU's operators compiled for an H200, without one: Triton's interpreter takes more than its compiler does."""

import os
import re
from typing import Any

import pytest
import torch

from compiled_adv.bucket import Bucket

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("make test runs these by themselves", allow_module_level=True)
operators = pytest.importorskip("compiled_adv.kernels.triton", reason="needs Triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

GPU = torch.device("cuda", 0)


class H200:
    """Triton's driver, as far as compiling asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched is compiled instead, and found here."""
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    found: list[Any] = []

    class Launch:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **how: found.append(self.kernel.warmup(*args, grid=grid, **how))

    monkeypatch.setattr(operators, "wrap_triton", Launch)
    driver.set_active(H200())
    return found


def arguments(rows: int, tokens: int, dtype: torch.dtype, critic: bool) -> dict[str, tuple[Any, ...]]:
    x_BT, mask_BT, ids_BT = (torch.zeros(rows, tokens, dtype=kind) for kind in (dtype, torch.float32, torch.int64))
    values_BT, row_B, double_B = x_BT.clone() if critic else None, torch.zeros(rows), torch.zeros(rows).double()
    end = torch.tensor(tokens - 1) if critic else None
    return {
        "backward_recurrence": (x_BT, values_BT, mask_BT, row_B, 0.99, double_B, end, critic),
        "row_moments": (x_BT, mask_BT),
        "merge_moments": (double_B, double_B, double_B, torch.zeros(rows, dtype=torch.int64)),
        "turn_totals": (x_BT, values_BT, ids_BT, mask_BT),
        "turn_counts": (ids_BT, mask_BT),
        "discounted_sum": (x_BT, x_BT),
    }


@pytest.mark.parametrize("rows", [operators.FEW_ROWS, 2], ids=["a program for each row", "a program for each block"])
@pytest.mark.parametrize("dtype, critic", [(torch.float32, True), (torch.bfloat16, False)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", operators.FORMS)
def test_an_operator_compiles(compiled, name, dtype, critic, rows):
    operators.FORMS[name](*arguments(rows, 2 * operators.BLOCK, dtype, critic)[name])
    assert compiled and all(kernel.asm["cubin"] for kernel in compiled)


def cuts(kernel: Any) -> set[str]:
    """How threads share the entries that a kernel scans and sums: it decides the order in which they are added."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.blocked<.*>)", text))
    combined = re.findall(r'"tt\.(?:scan|reduce)".*?\) : \((.*?)\) ->', text, re.DOTALL)
    return {layouts[name] for types in combined for name in re.findall(r"#\w+", types)}


@pytest.mark.parametrize("name", ["backward_recurrence", "turn_totals", "row_moments", "discounted_sum"])
def test_sums_are_cut_alike_in_every_bucket(compiled, name):
    seen = []
    for rows, tokens in [(2, 100), (2, 3001), (operators.FEW_ROWS, 3001), (operators.FEW_ROWS, 2048)]:
        bucket = Bucket(rows, tokens).on(GPU)
        compiled.clear()
        operators.FORMS[name](*arguments(bucket.rows, bucket.tokens, torch.float32, True)[name])
        seen.append(set().union(*map(cuts, compiled)))
    assert seen[0] and all(each == seen[0] for each in seen)
