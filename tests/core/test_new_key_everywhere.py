"""Pages, examples and errors say how keys are made and how dpjax is installed today."""

import json
import pathlib
import re
import subprocess

import jax
import pytest

from dpjax import trees
from dpjax.validate import UserError

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# What is read by people: pages, notebooks, examples; CHANGELOG tells of the past.
_READ = ("README.md", "CONTRIBUTING.md", "docs/", "notebooks/", "examples/", "configs/")
_CODE = ("dpjax/", "launch/", "benchmarks/", "requirements.txt", "pyproject.toml")
# A noise key that can be guessed.
_GUESSED = re.compile(
  r"(noise_key=|example_key=|\.transform\(|central\([^()]*, |add_gaussian\()"
  r"\s*jax\.random\.(key|PRNGKey)\("
)
# Nobody can install dpjax by its name: it is on no index.
_BY_NAME = re.compile(r"pip install[^\n`]* '?\"?dpjax(\[|\b(?!-|'s))")


def _files(*starts: str) -> list[pathlib.Path]:
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split("\n")
  ends = (".py", ".md", ".ipynb", ".toml", ".txt")
  found = [name for name in listed if name.startswith(starts) and name.endswith(ends)]
  return [_ROOT / name for name in found if (_ROOT / name).is_file()]


def _text(file: pathlib.Path) -> str:
  text = file.read_text()
  if file.suffix != ".ipynb":
    return text
  return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def _hits(pattern: re.Pattern[str], *starts: str) -> list[str]:
  return [
    f"{file.relative_to(_ROOT)}: {hit.group()}"
    for file in _files(*starts)
    for hit in pattern.finditer(_text(file))
  ]


def test_p18_no_page_takes_a_noise_key_that_can_be_guessed():
  assert _GUESSED.search("plan.transform(jax.random.key(0))")
  assert _GUESSED.search("federated.central(plan, jax.random.key(1))")
  assert not _hits(_GUESSED, *_READ)


def test_nothing_says_that_dpjax_is_on_an_index():
  for wrong in ("pip install dpjax", "pip install 'dpjax[runs]'", "pip install -U dpjax"):
    assert _BY_NAME.search(wrong)
  assert not _BY_NAME.search("pip install -e '.[he]' in dpjax's clone")
  assert not _hits(_BY_NAME, *_READ, *_CODE)


@pytest.mark.parametrize("key", [0, jax.random.PRNGKey(0), None, "secret"])
def test_what_is_no_key_is_told_of_new_key(key):
  with pytest.raises(UserError, match=r"dpjax\.new_key\(\)") as caught:
    trees.check_key(key=key)
  assert caught.value.field == "key"
