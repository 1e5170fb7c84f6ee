"""launch.report as users type it."""

import pytest

from dpjax.experiments.run import loop
from tests import commands
from tests.runs import small_configs


@pytest.mark.slow
def test_a_run_is_explained(tmp_path):
  loop.train(small_configs.short(), tmp_path / "run")
  done = commands.run("launch.report", str(tmp_path / "run"), f"--workdir={tmp_path}/board")
  assert done.returncode == 0 and done.stderr == "", done.stderr
  files = [f"{tmp_path}/board/{name}" for name in ("report.md", "report.html")]
  assert done.stdout == f"wrote {', '.join(files)}\n"
  # The run itself is as before: its command repeats its result.
  assert loop.train(small_configs.short(), tmp_path / "run")["num_steps"] == 12
