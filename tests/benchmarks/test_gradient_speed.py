import jax
import pytest

from benchmarks import alone, gradient_speed, workloads
from dpjax import models


@pytest.fixture
def _tiny(monkeypatch):
  work = workloads._images(models.Linear(num_classes=10), (4, 4, 1), 4)
  monkeypatch.setattr(workloads, "build", lambda name, platform: work)


@pytest.mark.slow
def test_what_a_file_holds_is_not_measured_again(_tiny, tmp_path):
  options = {"repeats": 1, "fresh_process": False, "batch_size": 6}
  entries = gradient_speed.measure("mlp", ["auto"], **options)
  assert [entry.batch for entry in entries] == [6, 6]
  assert entries[1].examples_per_s == pytest.approx(6 / entries[1].median_s)
  gradient_speed.write(entries, tmp_path)
  known = gradient_speed.read(tmp_path)
  assert known == entries
  assert gradient_speed.among(known, "mlp", ["auto"], 6) == entries
  # Another batch, method or workload is.
  assert not gradient_speed.among(known, "mlp", ["auto"], None)
  assert not gradient_speed.among(known, "mlp", ["vmap"], 6)
  assert not gradient_speed.among(known, "gpt", ["auto"], 6)
  assert gradient_speed.read(tmp_path / "none") == []
  assert "mlp       ordinary" in gradient_speed.table(entries)
  assert "mlp, 2    ordinary" in gradient_speed.table(
    [*entries, entries[0]._replace(batch=2)]
  )
  # A later measurement of something else takes nothing away.
  others = gradient_speed.measure("mlp", [], **options | {"batch_size": 2})
  gradient_speed.write(others, tmp_path)
  assert gradient_speed.read(tmp_path) == [*entries, *others]


def test_a_batch_is_as_large_as_asked_for(_tiny):
  work = workloads.build("mlp", "cpu")
  larger = workloads.resized(work, 6)
  assert larger.batch.x.shape == (6, 4, 4, 1)
  assert (larger.batch.x[4:] == work.batch.x[:2]).all()
  assert workloads.resized(work, 2).batch.y.shape == (2,)


def test_programs_are_compiled_ahead_in_processes_that_share_a_cache(monkeypatch, tmp_path):
  asked = []
  monkeypatch.setattr(alone, "run", lambda *order: asked.append(order))
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
  monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
  before = jax.config.jax_compilation_cache_dir
  try:
    gradient_speed.compile_ahead(["mlp"], ["auto", "torch"], processes=2)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  module = "benchmarks.gradient_speed"
  # PyTorch compiles nothing.
  assert sorted(asked) == [
    (module, "mlp", "auto", None, "compile"),
    (module, "mlp", "ordinary", None, "compile"),
  ]
