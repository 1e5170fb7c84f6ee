"""README's snippet runs as it stands, on a fresh clone: no data to prepare, no number to add."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SHOWN = r"(\d\.\d+) (\d\.\d+)\n"


def _block():
  (block,) = re.findall(r"(?ms)^```python\n(.*?)^```", (_ROOT / "README.md").read_text())
  return block


@pytest.mark.long
def test_the_snippet_runs_word_for_word(tmp_path):
  script = tmp_path / "snippet.py"
  script.write_text(_block())
  # No prepared data are found, nothing else of the clone is in the folder, and no extra is there.
  env = os.environ | {"TFDS_DATA_DIR": str(tmp_path), "PYTHONPATH": str(_ROOT)}
  done = subprocess.run(
    [sys.executable, "-m", "tests.without_runs", script],
    cwd=tmp_path,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  epsilon, accuracy = map(float, re.fullmatch(_SHOWN, done.stdout).groups())
  assert 2.9 < epsilon <= 3.0 and accuracy > 0.8


def test_the_snippet_is_guarded_and_teaches_no_fixed_key():
  block = _block()
  assert "Plan.for_data(" in block and "plan.clipped_grad(" in block and ".spent(" in block
  assert "plan.transform(dpjax.new_key())" in block and "rng=" not in block
