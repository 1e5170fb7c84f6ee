"""Runs notebooks and keeps what they show, with the sha256 of the code that made it.

  python -m notebooks.execute                               # all
  python -m notebooks.execute notebooks/secure_sums.ipynb   # these

Needs the extra `dev`; `secure_sums` also the extra `secure`. Each runs from top to bottom in an
empty folder, offline, on the embedded digits, as the tests run it.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
_KEY = "code_sha256"
_KEPT = ("kernelspec", "language_info")  # of the metadata; the kernel adds its versions


def code_sha256(notebook: nbformat.NotebookNode) -> str:
  """Of all code cells, in order."""
  cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
  return hashlib.sha256("\0".join(cells).encode()).hexdigest()


def is_fresh(notebook: nbformat.NotebookNode) -> bool:
  """Whether the outputs were made by the code that stands there."""
  return notebook.metadata.get("dpjax", {}).get(_KEY) == code_sha256(notebook)


def run(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> None:
  """Executes a notebook in `folder`, in place; no data set is found, so digits are loaded."""
  os.environ |= {"TFDS_DATA_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
  nbclient.NotebookClient(
    notebook,
    timeout=600,
    record_timing=False,
    resources={"metadata": {"path": str(folder)}},
  ).execute()


def _without_traces(notebook: nbformat.NotebookNode) -> None:
  """Keeps nothing of this machine or hour, so that the same outputs are the same file."""
  notebook.metadata = nbformat.from_dict(
    {key: notebook.metadata[key] for key in _KEPT if key in notebook.metadata}
  )
  notebook.metadata.language_info = {"name": "python"}
  for cell in notebook.cells:
    cell.metadata = {}
    if cell.cell_type == "code":
      cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
  notebook.metadata["dpjax"] = {_KEY: code_sha256(notebook)}


def main(*paths: str) -> None:
  """Executes and writes them."""
  for path in map(pathlib.Path, paths or sorted(map(str, FOLDER.glob("*.ipynb")))):
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
      run(notebook, pathlib.Path(folder))
    _without_traces(notebook)
    nbformat.write(notebook, path)
    print(f"{path}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
  main(*sys.argv[1:])
