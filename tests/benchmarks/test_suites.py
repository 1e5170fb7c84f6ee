"""The benchmark measures what it says, in one command; mistakes are one line."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gradient_speed, opacus_twins, workloads
from dpjax import gradients, models, trees
from dpjax.types import Example
from tests import commands
from tests.refuses import refuses


@pytest.fixture
def tiny(monkeypatch):
  """Every workload shrunk to a linear model on four images."""
  work = workloads._images(models.Linear(num_classes=10), (4, 4, 1), 4)
  monkeypatch.setattr(workloads, "build", lambda name, platform: work)
  return work


def _launch(*flags):
  return commands.run("benchmarks", *flags)


@pytest.mark.long
def test_every_method_is_measured_against_the_ordinary_gradient(tiny, tmp_path):
  methods = ("vmap", "ghost", "auto")
  entries = gradient_speed.measure("mlp", methods, repeats=2, fresh_process=False)
  assert [entry.method for entry in entries] == ["ordinary", *methods]
  assert entries[0].ratio == entries[0].memory_ratio == entries[0].compile_ratio == 1.0
  for entry in entries:
    assert entry.status == "ok" and entry.median_s > 0
    assert entry.ratio == entry.median_s / entries[0].median_s
  gradient_speed.write(entries, tmp_path)
  with open(tmp_path / "gradients.csv") as file:
    rows = list(csv.DictReader(file))
  assert [row["method"] for row in rows] == ["ordinary", *methods]
  assert {row["platform"] for row in rows} == {jax.default_backend()}
  assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
  assert "ghost" in gradient_speed.table(entries)


def test_stacked_gradients_that_do_not_fit_are_skipped_and_say_so(tiny):
  size = 4 * 170 * 4  # bytes of four float32 gradients of 170 parameters
  assert tiny.stacked_bytes == size
  assert gradient_speed.why_not("mlp", tiny, "vmap") == ""
  big = tiny._replace(batch=tiny.batch._replace(y=range(10**8)))
  assert "GB" in gradient_speed.why_not("mlp", big, "vmap")
  assert gradient_speed.why_not("mlp", big, "auto") == ""


@pytest.mark.parametrize("method", ["jax_privacy", "torch", "opacus", "opacus_ghost"])
def test_a_method_that_is_not_installed_is_named(method, tiny, monkeypatch):
  find = lambda name: None
  monkeypatch.setattr(gradient_speed.importlib.util, "find_spec", find)
  entries = gradient_speed.measure("mlp", [method], repeats=1, fresh_process=False)
  assert entries[1].status == "not installed" and entries[1].ratio is None
  assert "not installed" in gradient_speed.table(entries)


def test_every_workload_has_a_twin_or_a_reason(monkeypatch):
  monkeypatch.setattr(opacus_twins.importlib.util, "find_spec", lambda name: name)
  for name in workloads.NAMES:
    reason = opacus_twins.why_not(name, "opacus")
    assert (name in opacus_twins._TWINS) != reason.startswith("skipped: ")


@pytest.mark.parametrize("name", sorted(opacus_twins._TWINS))
def test_twins_have_the_parameters_of_their_workloads(name):
  """Nothing is run: one image or sentence builds the twin, which counts for itself."""
  pytest.importorskip("opacus")
  shapes = []

  def count():
    shapes.append(workloads.build(name, "cpu"))
    return 0

  jax.eval_shape(count)
  params, batch = shapes[0].params, shapes[0].batch
  dtype = np.int32 if jnp.issubdtype(batch.x.dtype, jnp.integer) else np.float32
  one = Example(np.zeros((2, *batch.x.shape[1:]), dtype), np.zeros(2, np.int32))
  twin = opacus_twins.build(name, one, trees.size(params))
  assert twin.losses(twin.model(twin.inputs)).shape == (2,)
  with pytest.raises(RuntimeError, match="parameters"):
    opacus_twins.build(name, one, trees.size(params) + 1)


@pytest.mark.filterwarnings("ignore")  # of third parties
def test_opacus_is_measured_in_the_same_run():
  pytest.importorskip("opacus")
  methods = opacus_twins.METHODS
  entries = gradient_speed.measure("small_cnn", methods, repeats=1, fresh_process=False)
  for entry in entries[1:]:
    assert entry.status == "ok" and entry.ratio == entry.median_s / entries[0].median_s
    assert entry.compile_s is None and entry.memory_ratio is None


@pytest.mark.parametrize(
  ("names", "methods", "field"),
  [(["mlpp"], [], "workloads"), (["mlp"], ["goast"], "methods")],
)
def test_unknown_names_suggest_the_nearest(names, methods, field):
  with refuses(field):
    gradient_speed.check(names, methods)


@pytest.mark.long
def test_the_command_prints_a_table_and_writes_the_files(tmp_path):
  done = _launch(
    "gradients", "--workloads=small_cnn", "--methods=auto", "--repeats=1",
    f"--out={tmp_path}",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  header, ordinary, auto = done.stdout.splitlines()
  assert header.split()[:4] == ["workload", "method", "median", "ratio"]
  assert ordinary.split()[:2] == ["small_cnn", "ordinary"]
  assert auto.split()[:2] == ["small_cnn", "auto"] and auto.endswith("MB")
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "gradients.csv",
    "gradients.picture.json",
    "gradients.png",
  ]


@pytest.mark.parametrize(
  "given",
  [
    ["speed"],
    ["gradients", "--repeats=0"],
    ["gradients", "--clients=4"],  # of another suite
    ["federated", "--nopeak_rss"],
    ["training", "--workloads=mlp"],
    ["sum_messages", "--out=~/x"],
  ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(given):
  done = _launch(*given)
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert given[-1].strip("-")[:5] in done.stderr


@pytest.mark.cases(quick=["scatter_cnn", "mlp", "wide_mlp"], long=...)
@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_fast_route_knows_every_workload_for_what_it_is(name):
  """By shapes alone; the plan leaves no dense or convolution kernel to the general rule,
  but for kernels that are transformed before they are used."""
  tables = []

  def plan():
    work = workloads.build(name, "cpu")
    example = jax.tree.map(lambda leaf: leaf[0], work.batch)
    tables.append(gradients.explain(work.loss_fn, work.params, example, platform="cpu"))
    return 0

  jax.eval_shape(plan)
  for row in tables[0].rows:
    kernels = any(site in row.sites for site in ("dot_general", "conv"))
    transformed = "transformed" in row.reason or "combined" in row.reason
    assert row.rule != "gradient" or not kernels or transformed, row


_OVER_TWO = """
from configs import quickstart
def get_config():
  config = quickstart.get_config()
  config.mesh, config.model.name, config.model.options = "data:2", "linear", {}
  return config
"""


@pytest.mark.slow
def test_a_config_is_timed_by_both_routes(tmp_path):
  """On its mesh: a batch that is not placed there is refused by the compiled step."""
  (tmp_path / "over_two.py").write_text(_OVER_TWO)
  flags = ("training", f"--configs={tmp_path}/over_two.py", "--repeats=1")
  done = _launch(*flags, "--cpu_devices=2", f"--out={tmp_path}")
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "training.csv") as file:
    rows = list(csv.DictReader(file))
  assert [(row["config"], row["method"]) for row in rows] == [
    ("over_two", "auto"),
    ("over_two", "vmap"),
  ]
  for row in rows:
    seconds = float(row["median_s"]) * int(row["num_steps"])
    assert float(row["minutes"]) == pytest.approx(seconds / 60)


def test_an_unknown_config_file_is_one_line():
  done = _launch("training", "--configs=configs/nowhere.py")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "--configs" in done.stderr
