"""The README's Python example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_first_python_example_prints_advantages(capsys) -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len(example.splitlines()) <= 22
    exec(compile(example, "README.md", "exec"), {})
    assert "tensor(" in capsys.readouterr().out
