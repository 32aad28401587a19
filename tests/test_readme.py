"""The README's Python lines do what they say."""

import re
from pathlib import Path

import pytest

from fst.pretrained import shipped

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_ten_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for name in re.findall(r'from_pretrained\("([a-z-]+)"\)', code):
        if name not in shipped() and f'save_pretrained("{name}")' not in code:
            pytest.skip(f"the weights {name} do not ship yet")
    exec(compile(code, "README.md", "exec"), {})
