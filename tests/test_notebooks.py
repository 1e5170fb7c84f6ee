"""Every notebook runs from top to bottom on the embedded data, offline; its outputs are fresh."""

import pathlib

import nbformat
import pytest

from notebooks import execute

_NEEDS = {"secure_sums": ("cryptography", "Crypto")}  # the extra `secure`
_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"


_EACH = pytest.mark.parametrize(
  "path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
_MOST = 300_000  # bytes of a file
_TRACES = (  # of a machine, of an error
  *(f"/{folder}/" for folder in ("tmp", "home", "root")),
  "Traceback (most recent call last)",
)


@pytest.mark.cases(
  slow=["formulas_of_tutorials", "privacy_utility_curve", "several_networks"], long=...
)
@_EACH
@pytest.mark.filterwarnings("ignore")  # of the Jupyter machinery, in this process
def test_notebook_runs(path, tmp_path, monkeypatch):
  for module in _NEEDS.get(path.stem, ()):
    pytest.importorskip(module, reason="needs the extra secure")
  for name in ("TFDS_DATA_DIR", "JAX_PLATFORMS"):  # `run` sets them
    monkeypatch.setenv(name, "")
  notebook = nbformat.read(path, as_version=4)
  execute.run(notebook, tmp_path)
  outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
  assert not [out for out in outputs if out.output_type == "error"]


@_EACH
def test_the_outputs_are_those_of_the_code(path):
  """By hand after an edit: `python -m notebooks.execute notebooks/NAME.ipynb`."""
  notebook = nbformat.read(path, as_version=4)
  assert execute.is_fresh(notebook), "its code was changed after its outputs were made"
  shown = [cell for cell in notebook.cells if cell.get("outputs")]
  assert shown and path.stat().st_size < _MOST
  assert not [trace for trace in _TRACES if trace in str([cell.outputs for cell in shown])]


def test_an_edited_notebook_is_stale():
  notebook = nbformat.read(_FOLDER / "fed_avg_pmap.ipynb", as_version=4)
  notebook.cells[0].source += " words"  # no code
  assert execute.is_fresh(notebook)
  next(c for c in notebook.cells if c.cell_type == "code").source += "\n"
  assert not execute.is_fresh(notebook)


def test_the_notebook_holds_the_readme_text():
  """The lines that README and the architecture guarantee are the lines that run here."""
  source = (_FOLDER / "dp_sgd_in_15_lines.ipynb").read_text()
  for line in (
    "dpjax.Plan.for_data(",
    "plan.clipped_grad(dpjax.losses.softmax_cross_entropy(model.apply))",
    "= 0.5, optax.sgd(2.0)",
    "optax.chain(plan.transform(dpjax.new_key()), sgd)",
    "tx.update(grad_fn(params, batch), opt_state, params)",
    "plan.batches(train)",
    "plan.spent(opt_state).epsilon, dpjax.accuracy(model.apply, params, test)",
  ):
    assert line in source
