"""What runs by itself: hooks of a commit, the workflow, the version that is released."""

import pathlib
import re
import tomllib

import pytest

import dev

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


def test_the_changelog_begins_with_the_version_of_the_package():
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
  version, date = re.findall(r"(?m)^## (\S+) \((.*)\)$", text)[0]
  assert version == project["version"]
  assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date)


def test_each_folder_has_its_tests_and_each_folder_of_tests_its_code():
  """As `python -m dev test` prints and runs them."""
  folders = dev.folders()
  for name, paths in folders.items():
    assert len(paths) > 1, name
    assert all((_ROOT / path).exists() for path in paths), name
  with_tests = {
    file.parent.relative_to(_ROOT).as_posix()
    for file in (_ROOT / "tests").glob("**/test_*.py")
  }
  named = {path for paths in folders.values() for path in paths}
  of_none = {
    path
    for path in with_tests
    if not any(path == name or path.startswith(f"{name}/") for name in named)
  }
  # Those of single files, and of results.
  assert of_none == {"tests", "tests/core", "tests/published"}


def test_a_short_command_runs_what_stands_in_the_table(monkeypatch, capsys):
  calls = []
  monkeypatch.setattr(
    dev.subprocess, "call", lambda command, cwd: calls.append(command) or 5
  )
  assert dev.main(["test", "sweeps", "-m", "long"]) == 5
  assert calls[0][1:] == [
    *("-m", "pytest", "-q", "dpjax/experiments/sweeps", "tests/sweeps", "-m", "long")
  ]
  assert dev.main(["test", "joint"]) == 5
  assert calls.pop()[4:] == ["dpjax/joint.py", "tests/core/test_joint.py"]
  assert dev.main(["package"]) == 5 and calls[1][1:] == ["-m", "build"]
  assert dev.main(["test", "gradint"]) == dev.main([]) == 2 and len(calls) == 2
  assert dev.main(["test"]) == 0 and "tests/core/gradients" in capsys.readouterr().out
