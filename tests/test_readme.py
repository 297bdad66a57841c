"""The README's Python runs as it stands: the first example here, functions of one row or prompt in tests/compiled."""

import inspect
import re
from pathlib import Path

from tests import examples

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FUNCTIONS = [x for name, x in vars(examples).items() if getattr(x, "__module__", "") == examples.__name__]


def test_the_first_python_example_prints_advantages(capsys) -> None:
    assert len(PYTHON[0].splitlines()) <= 22
    exec(compile(PYTHON[0], "README.md", "exec"), {})
    assert "tensor(" in capsys.readouterr().out


def test_the_worked_examples_are_the_tested_ones() -> None:
    shown = next(code for code in PYTHON if "@per_trajectory" in code)
    assert shown == inspect.getsource(examples).split('"""\n\n', 1)[1]


def test_each_worked_example_is_short() -> None:
    assert [fn.__name__ for fn in FUNCTIONS] == ["overlong", "leave_one_out", "td_lambda", "centred"]
    assert max(len(inspect.getsource(fn).splitlines()) for fn in FUNCTIONS) < 12
