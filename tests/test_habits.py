"""What runs by itself: hooks of a commit, the workflow, the version that is released."""

import pathlib
import re
import tomllib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _yaml(path):
  yaml = pytest.importorskip("yaml")
  return yaml.safe_load((_ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_whole_check_and_builds_the_package():
  jobs = _yaml(".github/workflows/check.yml")["jobs"]
  commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
  assert ".ci/run" in commands
  assert any("python -m build" in command for command in commands)


def test_the_hooks_run_what_the_whole_check_runs():
  (repo,) = _yaml(".pre-commit-config.yaml")["repos"]
  hooks = {hook["entry"].removesuffix(" --fix") for hook in repo["hooks"]}
  whole = (_ROOT / ".ci/run").read_text(encoding="utf-8")
  assert hooks == {"ruff check", "ruff format", "basedpyright"}
  assert all(re.search(rf"(?m)^{hook}\b", whole) for hook in hooks)


def test_forms_of_issues_ask_for_something():
  for path in (_ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
    body = _yaml(path)["body"]
    assert any(part.get("validations", {}).get("required") for part in body), path


def test_the_changelog_begins_with_the_version_of_the_package():
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
  version, date = re.findall(r"(?m)^## (\S+) \((.*)\)$", text)[0]
  assert version == project["version"]
  assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date)
