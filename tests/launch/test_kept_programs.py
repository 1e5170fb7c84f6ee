"""Launchers keep compiled programs in the user's cache."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest

_SAID = "import launch, os; print(os.environ.get('JAX_COMPILATION_CACHE_DIR'))"


def _folder(tmp_path, **variables):
  env = {**os.environ, "HOME": str(tmp_path), **variables}
  for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
    if name not in variables:
      env.pop(name, None)
  ran = subprocess.run(
    [sys.executable, "-W", "error", "-c", _SAID], env=env, capture_output=True, text=True
  )
  assert ran.returncode == 0, ran.stderr
  assert not ran.stderr
  return ran.stdout.strip()


def test_they_lie_in_a_folder_that_others_cannot_read(tmp_path):
  folder = pathlib.Path(_folder(tmp_path))
  assert folder.parent == tmp_path / ".cache" / "dpjax" / "programs"
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  assert _folder(tmp_path) == str(folder)


def test_the_users_own_folders_go_before(tmp_path):
  mine = str(tmp_path / "mine")
  assert _folder(tmp_path, JAX_COMPILATION_CACHE_DIR=mine) == mine
  assert _folder(tmp_path, JAX_COMPILATION_CACHE_DIR="") == ""
  assert _folder(tmp_path, XDG_CACHE_HOME=mine).startswith(mine)


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
  folder = pathlib.Path(_folder(tmp_path))
  for mode in (0o770, 0o707):
    folder.chmod(mode)
    assert _folder(tmp_path) == "None"
  folder.chmod(0o700)
  assert _folder(tmp_path) == str(folder)


def test_without_a_home_nothing_is_kept(tmp_path):
  (tmp_path / "file").write_text("")
  assert _folder(tmp_path, HOME=str(tmp_path / "file")) == "None"


_RUN = ["--config.num_steps=2", "--config.noise_seed=3", "--config.release=false"]


@pytest.mark.slow
def test_kept_programs_change_no_bit(tmp_path):
  made = []
  for number, kept in enumerate(["true", "true", "false"]):
    folder = tmp_path / str(number)
    subprocess.run(
      [sys.executable, "-m", "launch.train", *_RUN, f"--workdir={folder}"],
      env={
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": kept,
      },
      check=True,
      capture_output=True,
    )
    made.append((folder / "params.npz").read_bytes())
    assert any((tmp_path / "programs").iterdir())
  assert made[0] == made[1] == made[2]
