"""`python -m launch.prepare`: every mistake is one line on stderr."""

import importlib.util
import lzma
import os
import pathlib

import pytest

from tests import commands

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data" / "tfds"
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


def prepare(*flags, **environment):
  env = {key: value for key, value in os.environ.items() if key != "TFDS_DATA_DIR"}
  return commands.run("launch.prepare", *flags, env=env | environment)


def assert_one_line(done, says, code=2):
  lines = done.stderr.splitlines()
  assert done.returncode == code and len(lines) == 1, done.stderr
  assert lines[0].startswith("error: ") and says in lines[0] and done.stdout == ""


@pytest.mark.cases(slow=[1])
@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ((), "--dataset"),
    (("--dataset=mnst",), "did you mean 'mnist'?"),
    (("--datset=mnist",), "datset"),
    (("mnist",), "--dataset"),
  ],
)
def test_mistakes(tmp_path, flags, says):
  assert_one_line(prepare(*flags, TFDS_DATA_DIR=str(tmp_path)), says)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(HAS_TENSORFLOW, reason="TensorFlow is installed")
def test_without_tensorflow_it_says_what_to_install(tmp_path):
  done = prepare("--dataset=mnist", f"--data_dir={tmp_path}")
  assert_one_line(done, "pip install -e '.[prepare]'")
  assert not list(tmp_path.iterdir())


def test_digits_need_no_preparation():
  done = prepare("--dataset=digits")
  assert done.returncode == 0 and "embedded" in done.stdout and done.stderr == ""


def test_help_names_the_extra_and_the_flags():
  text = prepare("--help").stdout
  assert ".[prepare]" in text and "--data_dir" in text and "--dataset" in text


@pytest.mark.slow
def test_prepared_data_is_left_alone_and_counted():
  folder = pathlib.Path(os.environ.get("TFDS_DATA_DIR") or SHARED)
  if not folder.is_dir():
    pytest.skip("no prepared data: set TFDS_DATA_DIR")
  done = prepare("--dataset=mnist", TFDS_DATA_DIR=str(folder))
  assert done.returncode == 0 and done.stderr == ""
  assert f"mnist: train 60000, test 10000 examples in {folder}" in done.stdout


@pytest.mark.slow
def test_no_network_is_one_error_with_the_reason(tmp_path, monkeypatch):
  import requests
  import tensorflow_datasets as tfds

  from launch import prepare as launcher

  def offline(url, **kwargs):
    raise requests.ConnectionError("Name or service not known\nand more lines")

  monkeypatch.setattr(requests, "get", offline)
  monkeypatch.setattr(launcher, "_require_tensorflow", lambda: None)
  builder = type("Builder", (), {"url_infos": {"https://example.org/a.gz": None}})
  monkeypatch.setattr(tfds, "builder", lambda *args, **kwargs: builder)
  with pytest.raises(OSError, match="Name or service not known") as caught:
    launcher.prepare("mnist", tmp_path)
  message = str(caught.value)
  assert "https://example.org/a.gz" in message and "'mnist'" in message
  assert "\n" not in message


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="writing needs TensorFlow")
def test_written_files_are_what_load_reads(tmp_path):
  import tensorflow_datasets as tfds

  from dpjax import data
  from launch import prepare as launcher

  class TinyDigits(tfds.testing.DummyMnist):
    """Twenty images made up on the spot: TFDS's real writer without a download."""

  assert launcher.prepare("tiny_digits", tmp_path) == {"train": 20, "test": 20}
  train, _ = data.load("tiny_digits", tmp_path)
  assert train.x.shape == (20, 28, 28, 1) and train.num_classes == 10
  assert TinyDigits.name == "tiny_digits"


def test_a_folder_for_the_embedded_digits_is_refused(tmp_path):
  done = prepare("--dataset=digits", f"--data_dir={tmp_path}")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "--data_dir" in done.stderr and not list(tmp_path.iterdir())


def test_a_federation_is_unpacked_as_it_comes(tmp_path, monkeypatch):
  from launch import prepare as launcher

  packed, held = tmp_path / "emnist_all.sqlite.lzma", b"SQLite" * 100_000
  packed.write_bytes(lzma.compress(held, lzma.FORMAT_ALONE))
  monkeypatch.setattr(launcher.tff, "URL", tmp_path.as_uri() + "/")
  path = launcher.fetch("femnist", tmp_path / "new")
  assert path == tmp_path / "new" / "emnist_all.sqlite" and path.read_bytes() == held
  packed.write_bytes(packed.read_bytes()[:40])
  assert launcher.fetch("femnist", tmp_path / "new").read_bytes() == held  # is there
  for name, why in {"femnist": "EOFError", "stackoverflow": "URLError"}.items():
    with pytest.raises(OSError, match=f"could not fetch file://.*: {why}") as caught:
      launcher.fetch(name, tmp_path / "cut")
    assert "\n" not in str(caught.value) and not list((tmp_path / "cut").iterdir())
