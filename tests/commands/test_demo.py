"""`fst demo`: what it says before it trains."""

import re

from rich.console import Console

from fst.commands import demo


def test_shipped_weights_answer_before_anything_is_trained(tmp_path, monkeypatch):
    """The folder of the run stays free, and the error is of the order of the card's."""
    trained = []
    monkeypatch.setattr(demo, "train", lambda recipe, out, **_: trained.append(out.exists()))
    monkeypatch.setattr(demo, "evaluate", lambda *_, **__: None)
    monkeypatch.setattr(demo, "report", lambda *_: "page")
    console = Console(width=400, record=True)
    demo.demo(tmp_path / "run", device="cpu", console=console)
    assert trained == [False]
    assert (tmp_path / "run-at-once.png").is_file()
    found = re.search(r"205,824 points .* relative L2 error (0\.\d+)\.", console.export_text())
    assert found
    assert 0 < float(found[1]) < 0.03
