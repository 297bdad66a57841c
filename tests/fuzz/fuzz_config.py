"""Any configuration, as a mapping, as an object or as a file: a Spec, or a CompiledAdvError, in bounded time.

What loads must also build, or be refused; and what builds must compute a small batch, or refuse it.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

import compiled_adv
from compiled_adv.errors import CompiledAdvError
from compiled_adv.spec import Advantage, Compiled, Norm, Spec, StageChoice
from tests.contracts.small import rows
from tests.fuzz.limits import bounded
from tests.fuzz.values import Odd, numbers, odd, texts, things

MODELS = (Spec, Advantage, Compiled, Norm, StageChoice)
NAMES = sorted({name for model in MODELS for name in model.model_fields} | {"against", "every", "actor", "unknown"})
BLOCKS = {"reward_norm": Norm, "adv_norm": Norm, "advantage": Advantage, "compiled": Compiled}
CHOICES = ("compute", "outcome_reward_shaping", "estimator", "process_adv_shaping")
BATCH = rows("pgg", "pgp.", rewards=[1, -1], turn_ids=[[-1, 0, 0, -1], [-1, 0, -1, -1]])

# Pieces of YAML and JSON that mean something to a parser.
PIECES = (
    *(
        "actor:",
        "advantage:",
        "  ",
        "\n",
        "\n  ",
        "- ",
        ": ",
        "? ",
        "&a ",
        "*a",
        "<<: *a",
        "{",
        "}",
        "[",
        "]",
        ",",
        "|",
        ">",
    ),
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!binary x", "!!set", "!!int x", "!!float x"),
    *(
        "!!timestamp 2020-99-99",
        "2020-99-99",
        "2020-01-01T99:99:99",
        "!!omap [1]",
        "!!pairs [1]",
        "!!merge",
        "!",
        "%YAML 1.1",
    ),
    *(
        "1:2:3:4",
        "0x",
        "0b2",
        "0o9",
        "1_0",
        ".inf",
        "-.INF",
        ".nan",
        "1e999",
        "~",
        "yes",
        "=",
        "<<",
        "---",
        "...",
        "\t",
        "#",
    ),
    *('"\\ud800"', '"\\x00"', "\ufeff", "\x85", "\u2028", "\x00", "'", '"', "null", "true", "NaN", "Infinity", "-0"),
    "9" * 5000,
    *NAMES,
)


class Attributes(SimpleNamespace):
    """A trainer's config object."""


@st.composite
def blocks(draw: st.DrawFn, model: Any, depth: int = 0) -> Any:
    """Some keys of a model, with values that fit now and then."""
    block: dict[Any, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(model.model_fields)), max_size=4, unique=True)):
        if name in BLOCKS and draw(st.booleans()):
            block[name] = draw(blocks(BLOCKS[name], depth + 1))
        elif name in CHOICES and draw(st.booleans()):
            block[name] = draw(blocks(StageChoice, depth + 1))
        else:
            block[name] = draw(numbers | texts | odd | things)
    if draw(st.integers(0, 4)) == 0:
        block[draw(texts | st.sampled_from(NAMES) | numbers.filter(lambda x: x == x))] = draw(things)
    return (
        Attributes(**{k: v for k, v in block.items() if isinstance(k, str)}) if draw(st.integers(0, 5)) == 0 else block
    )


def nested(depth: int, kind: str) -> Any:
    """Far deeper than anyone writes."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"actor": value}
    return value


deep = st.builds(nested, st.integers(1, 3000), st.sampled_from(("list", "dict")))
mappings = blocks(Spec) | st.fixed_dictionaries({"actor": blocks(Spec) | things | deep}) | things | deep


def bomb(levels: int) -> str:
    """Aliases that stand for ten to the power of `levels` numbers."""
    lines = ["actor:", "  a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"  a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """A configuration file: a valid one, one with some pieces put in, or none at all."""
    kind = draw(st.sampled_from(("pieces", "dump", "dump", "bomb", "deep", "bytes", "json")))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "bomb":
        return bomb(draw(st.integers(1, 12))).encode()
    if kind == "deep":
        return (draw(st.sampled_from(("[", "{a: ", "- ", '{"a":', "!!set {"))) * draw(st.integers(1, 20000))).encode()
    if kind == "pieces":
        return "".join(draw(st.lists(st.sampled_from(PIECES), max_size=14))).encode(errors="surrogatepass")
    content = draw(blocks(Spec))
    text = json.dumps(_plain(content)) if kind == "json" else yaml.safe_dump(_plain(content))
    at = draw(st.integers(0, len(text)))
    return (text[:at] + draw(st.sampled_from(PIECES)) * draw(st.integers(0, 1)) + text[at:]).encode(
        errors="surrogatepass"
    )


def _plain(value: Any, depth: int = 0) -> Any:
    """What a file can say of a value."""
    if depth > 20:  # it may hold itself
        return None
    if isinstance(value, dict):
        return {str(k)[:100] if isinstance(k, str) else "key": _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value[:4]]
    big = isinstance(value, int) and abs(value) > 2**70
    return value if type(value) in (int, float, bool, str) and not big else None


def check(config: Any) -> None:
    """Load, build, compute."""
    with bounded():
        try:
            spec = compiled_adv.load_config(config)
            assert isinstance(spec, Spec)
            eager = spec.advantage.model_copy(update={"backend": "eager"})
            compute = compiled_adv.build(spec.model_copy(update={"advantage": eager}))
            compute(BATCH)
            compute.explain()
        except CompiledAdvError as error:
            assert len(str(error)) < 5000, "a message is read by people"


@given(mappings)
def fuzz_mapping(config: Any) -> None:
    check(config)


@given(written(), st.sampled_from((".yaml", ".json", ".yml", "")))
def fuzz_file(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config{suffix}"
        path.write_bytes(content)
        check(path)


@given(texts | odd.filter(lambda x: not isinstance(x, Odd)) | st.text(st.characters(), max_size=300))
def fuzz_name(config: Any) -> None:
    """What may stand for a path or a recipe."""
    check(config)
