"""Any bytes as a rollout file: a dict of tensors that the computation takes or refuses, or a RolloutFile error.

Files start whole, so that more than the first check is reached: then a header entry or some bytes are changed.
"""

import io
import json
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import compiled_adv
from compiled_adv.errors import CompiledAdvError, RolloutFile
from compiled_adv.rollouts import read_groups, write_group
from tests.contracts.small import rows
from tests.fuzz.fuzz_compute import KEYS, changed
from tests.fuzz.limits import bounded
from tests.fuzz.values import EDGES, things

WHOLE = rows(
    "pgg",
    "pg.",
    rewards=[1, -1],
    values=[[0, 1, 2], [0, 1, 0]],
    turn_ids=[[-1, 0, 0], [-1, 0, -1]],
    token_rewards=[[0, 0.5, 0.5], [0, 0, 0]],
)
MORE = {"row_counts": torch.tensor([1, 1]), "references": torch.tensor([0.5, float("nan")])}
ST_DTYPES = "F32 F64 F16 BF16 I64 I32 I8 U8 U16 U32 U64 BOOL F8_E4M3 F8_E8M0 F4 C64 X9".split()
COMPUTE = compiled_adv.build({"advantage": {"backend": "eager"}})


def cut(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes changed, removed or added."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        kind = draw(st.sampled_from(("flip", "flip", "cut", "add", "swap")))
        if kind == "flip" and out:
            out[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del out[at : at + draw(st.integers(1, 40))]
        elif kind == "add":
            out[at:at] = draw(st.binary(max_size=20))
        elif out:
            end = draw(st.integers(0, len(out)))
            out = out[end:] + out[:end]
    return bytes(out)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """A legal prompt with something changed."""
    group: dict[Any, Any] = WHOLE | (MORE if draw(st.booleans()) else {})
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from((*KEYS, *MORE)))
        group[key] = draw(changed(group.get(key)))
    return group


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    group = {k: x for k, x in draw(tensors()).items() if isinstance(x, torch.Tensor) and x.layout == torch.strided}
    small = {k: x for k, x in group.items() if x.device.type == "cpu" and x.numel() < 1 << 16}
    try:
        content = save({k: x.detach().contiguous() for k, x in small.items()})
    except Exception:  # not every dtype has a name there
        content = save(WHOLE)
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    kind = draw(st.sampled_from(("whole", "bytes", "header", "header", "header", "size")))
    if kind == "bytes":
        return cut(draw, content)
    if kind == "header":
        name = draw(st.sampled_from(sorted(header)))
        header[name] = draw(entries(header[name]))
    text = json.dumps(header, default=str).encode(errors="surrogatepass")
    stated = draw(st.integers(0, 2**64 - 1)) if kind == "size" else len(text)
    return struct.pack("<Q", stated) + text + content[8 + size :]


@st.composite
def entries(draw: st.DrawFn, entry: Any) -> Any:
    """A header entry with one part changed."""
    number = st.sampled_from([x for x in EDGES if isinstance(x, int) and abs(x) < 2**70]) | st.integers(0, 20)
    part = draw(st.sampled_from(("dtype", "shape", "data_offsets", "all")))
    if part == "all" or not isinstance(entry, dict):
        return draw(st.none() | st.integers() | st.lists(number, max_size=3))
    value = draw(st.sampled_from(ST_DTYPES)) if part == "dtype" else draw(st.lists(number, max_size=4))
    return entry | {part: value}


@st.composite
def pt_files(draw: st.DrawFn) -> bytes:
    content: Any = draw(tensors() | things)
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except Exception:  # not everything can be pickled
        torch.save(WHOLE, buffer)
    whole = buffer.getvalue()
    kind = draw(st.sampled_from(("whole", "bytes", "pickle", "pickle", "old")))
    if kind == "bytes":
        return cut(draw, whole)
    if kind == "old":
        buffer = io.BytesIO()
        torch.save(WHOLE, buffer, _use_new_zipfile_serialization=False)
        return cut(draw, buffer.getvalue())
    if kind == "whole":
        return whole
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as before, zipfile.ZipFile(packed, "w") as after:
        for entry in before.infolist():
            data = before.read(entry)
            after.writestr(entry.filename, cut(draw, data) if entry.filename.endswith("data.pkl") else data)
    return packed.getvalue()


def check(content: bytes, suffix: str) -> None:
    """Read; then what was read computes or is refused, and writes back."""
    with bounded(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"group{suffix}"
        path.write_bytes(content)
        try:
            groups = read_groups([path])
        except RolloutFile as error:
            assert str(path) in str(error) and len(str(error)) < 5000
            return
        size = sum(x.nbytes for group in groups for x in group.values() if isinstance(x, torch.Tensor))
        assert size <= len(content), "more than the file holds"
        try:
            outs = COMPUTE.compute_advantages(groups)
        except CompiledAdvError:
            return
        assert all(torch.isfinite(out["advantages"]).all() for out in outs)
        write_group(path, outs[0])
        assert read_groups([path])[0].keys() == outs[0].keys()


@given(safetensors_files() | st.binary(max_size=100))
def fuzz_safetensors(content: bytes) -> None:
    check(content, ".safetensors")


@given(pt_files() | st.binary(max_size=100))
def fuzz_pt(content: bytes) -> None:
    check(content, ".pt")
