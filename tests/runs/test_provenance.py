"""Versions, commit and device."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import launch  # noqa: F401, so that it is imported
from dpjax.experiments.run import provenance


def test_versions_are_those_imported_and_hold_no_path():
  found = provenance.versions()
  assert found["jax"] == jax.__version__ and found["dp_accounting"] and found["dpjax"]
  names = {"jaxlib", "flax", "optax", "numpy", "scipy", "python", "git_commit"}
  assert names <= set(found)
  assert "/" not in json.dumps(found)


def test_a_checkout_knows_its_commit():
  root = pathlib.Path(provenance.__file__).parents[3]
  tracked = provenance._git(root, "ls-files", "--", "dpjax/__init__.py")
  assert bool(provenance.versions()["git_commit"]) == bool(tracked)


def test_unknown_distribution_has_no_version(monkeypatch):
  monkeypatch.setattr(provenance, "_DISTRIBUTIONS", ("numpy", "no-such-distribution"))
  found = provenance.libraries()
  assert found["numpy"] and found["no-such-distribution"] is None


def test_commands_of_dpjax_are_not_the_users_own():
  own = provenance.own_modules()
  assert "launch" in sys.modules and __name__ in own
  assert not [name for name in own if name.partition(".")[0] in ("dpjax", "launch")]


def test_device_counts_and_names():
  text = provenance.device()
  assert text.startswith(f"{jax.device_count()} x ") and "core" in text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_of_the_package_only(tmp_path):
  def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(
      ["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True
    )

  package, vendored = tmp_path / "dpjax", tmp_path / "env" / "dpjax"
  for folder in (package, vendored):
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
  assert provenance.git_commit(package) is None  # no repository
  git("init", "-q")
  assert provenance.git_commit(package) is None  # no commit
  git("add", "env")
  git("commit", "-qm", "env")
  assert provenance.git_commit(package) is None  # another project's: not tracked in it
  git("add", "dpjax")
  git("commit", "-qm", "dpjax")
  commit = provenance.git_commit(package)
  assert commit is not None and len(commit) == 40
  assert provenance.git_commit(vendored) is None  # inside somebody's environment
  (package / "a.py").write_text("a = 2\n")
  assert provenance.git_commit(package) == f"{commit}-dirty"
