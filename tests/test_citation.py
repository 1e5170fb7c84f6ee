"""CITATION.cff: what the format asks for, and what pyproject.toml says."""

import pathlib
import tomllib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_REQUIRED = {"cff-version", "message", "title", "authors"}  # by the schema of CFF 1.2.0
_OURS = {"type", "abstract", "version", "license", "keywords"}  # further keys of the schema


def test_the_citation_agrees_with_the_package():
  yaml = pytest.importorskip("yaml")
  found = yaml.safe_load((_ROOT / "CITATION.cff").read_text(encoding="utf-8"))
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  assert set(found) == _REQUIRED | _OURS
  assert (found["cff-version"], found["type"]) == ("1.2.0", "software")
  assert found["version"] == project["version"]
  assert found["license"] == project["license"]
  assert found["title"].startswith(project["name"])
  assert found["authors"] == [{"name": "The dpjax authors"}]
  assert all(isinstance(word, str) for word in found["keywords"])
