"""The code blocks of docs/guides/rllib.md, in their order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import command_environment

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "rllib.md"
START = """
import logging, ray
from raysearch.processes.ray_internals import without_what_nobody_asks
with without_what_nobody_asks():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
storage = {storage!r}
"""


@pytest.mark.slow
def test_the_code_blocks_of_the_page_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join([START.format(storage=str(tmp_path / "tune")), *blocks]), encoding="utf-8")
    environment = {**command_environment(), "HOME": str(tmp_path)}  # RLlib keeps results there
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in ("40 True True\n", "[12, 12]\n", "20.0\n"):
        assert line in done.stdout, done.stderr[-4000:]
