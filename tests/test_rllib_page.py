"""The code blocks of docs/rllib.md, in their order."""

import logging
import re
from pathlib import Path

import pytest
import ray

PAGE = Path(__file__).parents[1] / "docs" / "rllib.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
def test_the_code_blocks_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[1]))
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ray.shutdown()  # of whatever test of this process left one running
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    names = {"storage": str(tmp_path / "tune"), "__name__": "page"}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        ray.shutdown()
    printed = capsys.readouterr().out
    for line in ("40 True 10\n", "[12, 12]\n", "8 4\n", "20.0\n"):
        assert line in printed
