"""Every notebook runs from top to bottom on the embedded data, offline."""

import pathlib

import nbclient
import nbformat
import pytest

_NEEDS = {"secure_sums": ("cryptography", "Crypto")}  # the extra `secure`
_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"


@pytest.mark.parametrize(
  "path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
@pytest.mark.filterwarnings("ignore")  # of the Jupyter machinery, in this process
def test_notebook_runs(path, tmp_path, monkeypatch):
  for module in _NEEDS.get(path.stem, ()):
    pytest.importorskip(module, reason="needs the extra secure")
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))  # no prepared data: digits
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
    notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
  ).execute()
  outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
  assert not [out for out in outputs if out.output_type == "error"]


def test_the_notebook_holds_the_readme_text():
  """The lines that README and the architecture promise are the lines that run here."""
  source = (_FOLDER / "dp_sgd_in_15_lines.ipynb").read_text()
  for line in (
    "dpjax.per_example_grads(dpjax.losses.softmax_cross_entropy(model.apply))",
    "optax.chain(plan.transform(jax.random.key(1)), optax.sgd(0.5, momentum=0.9))",
    "tx.update(grads, opt_state, params, mask=batch.mask)",
    "plan.batches(train, rng=2)",
    "plan.epsilon(delta=1e-5), dpjax.accuracy(model.apply, params, test)",
  ):
    assert line in source
