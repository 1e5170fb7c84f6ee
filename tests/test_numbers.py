"""Numbers on the pages are those of the committed results, and what is said of them is so."""

from __future__ import annotations

import collections
import fnmatch
import json
import pathlib
import re
import subprocess

import pytest

from tests import tables
from tests.accounting import test_page
from tests.commands import ROOT

_DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
_PAGES = ["README.md", *_DOCS]
# Tables in which nothing is measured, by page. Heads that end in a comment hold what was measured
# once, by the command beside it, and is not kept as a file.
_HEADS: dict[str, tuple[str, ...]] = {
  "docs/accelerators.md": (
    "| line of the plan | what it says | how exact it is |",
    "| text | machine |",
  ),
  "docs/gallery.md": ("| flag | what it sets |",),
  "docs/pate.md": (
    "| `--config.` | what it sets |",
    "| relation | who chooses the teacher of a record | why one record changes one vote |",
    "| number | depends on the votes | may be published | key of result.json |",
  ),
  "docs/distillation.md": (
    "| `--config.method=` | the student reads | accounted |",
    "| `--config.` | what it sets |",
    "| the pool is | the run |",
  ),
  "docs/synthesis.md": (
    "| file | what it holds |",
    "| `--config.` | what it sets |",
    "| relation | largest move of all sums by one record | why |",
    "| `--config.method.` | what it sets |",
  ),
  "docs/design/how_to_add.md": ("| your sampler | copy |",),
  "docs/correlated.md": (
    (
      "| `--config.privacy.ftrl.strategy` | the noise of a step | copies of the parameters in "
      "memory | choose it when |"
    ),
    "| batches | `banded`, `tree` | `band_inv_mf`, `bisr`, `bifr`, `lambda_cgd` |",
  ),
  "README.md": (
    "| command | what it does |",
    "| what you want | pages |",
  ),
  "docs/accounting.md": (
    "| file | what it holds | read by |",
    "| flag | what it adds |",
    test_page.HEAD,  # which computes it
    "| column or row | flags |",
    "| you do | what happens |",
    "| in the runs | what happens |",
    "| command above | simulated (at 99 %) | proved | unamplified |",  # which a test of it computes
  ),
  "docs/serve.md": (
    "| run | served |",
    "| what happens | what the service does |",
    "| request | body | answer |",
    "| status | meaning |",
    "| `--drift_inputs` | bins |",
    "| `--reference` | rows | cost |",
    "| rule | effect |",
  ),
  "docs/attacks.md": (
    "| `verdict` | meaning |",
    "| part | attacks | defences |",
    "| `--config=configs/attack/` or flag | what it does |",
    (
      "| seen, before `bavaria` and `rmia_tuned` were among the methods | RMIA | "
      "loss | LiRA |"
    ),  # once, as it says
    "| key of `result.json` | meaning |",
    "| `rmia_tuned` | RMIA, gamma 2 | BaVarIA | LiRA |",
  ),
  "docs/audits.md": (
    "| verdict | meaning |",
    "| what is put to the test | command |",
    "| number | meaning |",  # of the line above it, once
    "| audit | the most that it can show |",
    "| twin | what is broken |",
    "| `audit.kind` | a canary sends | the model | who leaves |",
    "| `privacy.method` | the claim | the adversary sees |",
    "| test | meaning | it refutes |",
  ),
  "docs/coming_from.md": (
    "| you wrote | here | what differs |",
    "| Opacus | dpjax |",
    "| JAX-Privacy 2.0 | dpjax |",
    "| TensorFlow Privacy | dpjax |",
    "| Flower | dpjax |",
    "| TFF | dpjax |",
    "| pfl | dpjax |",
  ),
  "docs/comparison.md": (
    "| | version read | what it is |",
    (
      "| | dpjax | JAX-Privacy | Opacus | TF Privacy | FedJAX | pfl-research | Flower | "
      "TFF | PySyft |"
    ),
  ),
  "docs/compose.md": (
    "| part | what it is |",
    "| the student reads | use | accounted |",
  ),
  "docs/curves.md": (
    "| flag | what it does |",
    "| command | what it draws |",
  ),
  "docs/federated.md": (
    "| | names |",
    "| `--config.partition=` | `--config.data.name=` | prepared by |",
    "| flag | what it bounds |",
  ),
  "docs/finetune.md": (
    "| where a name stands | linen | nnx |",
    "| model | images are resized to | outputs of | numbers of an example |",
    "| `--config.model.name` | names of | options of a published model |",
    "| flag | what is trained |",
    "| `--config.pretrained=` | what is read |",
    "| what is trained | loss | parameters to begin from | the model afterwards |",
  ),
  "docs/getting_started.md": (
    "| step | minutes by the clock | processor seconds |",  # once, as it says
    "| command | what you get |",
  ),
  "docs/glossary.md": ("| word | meaning |",),
  "docs/gradients.md": (
    "| call | what it does |",
    "| composition | what happens |",
  ),
  "docs/design/README.md": ("| note | about |",),
  "docs/design/noise_and_keys.md": ("| noise | reads | reaches |",),
  "docs/index.md": (
    "| file in `runs/quickstart` | what it is |",
    "| you want to | read |",
    "| notebook | what it shows |",
  ),
  "docs/language_models.md": (
    "| `data.name` | an example is |",
    "| option | what it does |",
  ),
  "docs/machines.md": (
    "| you have | command or call |",
    "| | central training | federated runs |",
  ),
  "docs/overflow.md": (
    "| what a library may do | what follows |",
    "| message | what to do |",
  ),
  "docs/papers.md": (
    "| method | where | source |",
    "| paper | what of it is here | what is not, and why |",
  ),
  "docs/promises.md": (
    "| what was not used | where it stands |",
    "| kind | its basis |",
    "| | meaning | where it stands |",
    "| guarantee | `launch.account` | config of `launch.train` and `launch.federate` | Python |",
    "| | meaning | where it stands in `result.json` |",
    "| relation | the two data sets | what one record moves, at clip norm C |",
    "| kind | what it rests on |",
    "| data | the constant | where it comes from |",
    "| | when |",
    "| what happens to the state | what follows |",
  ),
  "docs/reference/index.md": (
    "| name | what it is |",
    "| package | what it holds |",
  ),
  "docs/release.md": (
    "| | |",
    "| not seen | what to do |",
  ),
  "docs/relevance.md": (
    "| `verdict` | meaning |",
    "| mode | what it does | epsilon |",
    "| in `result.json` | meaning |",
    "| noise | of one number | of each number of a record |",
    "| name | code | why it fails |",
  ),
  "docs/sampling.md": (
    "| relation | what is public | pair of one step, in clip norms |",
    "| sampler | relation | accountant | epsilon |",  # which test_exchanged_sample computes
    "| sampler | who takes part in a step | choose it when |",
    "| steps t | times k | k out of t | Poisson | unamplified |",  # which test_k_out_of_t computes
  ),
  "docs/secure.md": (
    "| you want | use | extra |",
    "| task under CKKS | result |",  # once, as it says
    "| question | answer |",
  ),
  "docs/threat_model.md": (
    "| `privacy.method` | who is trusted | what the epsilon covers |",
    "| what an adversary may see | what defends |",
  ),
  "docs/toolbox.md": ("| what | how | proved under |",),
  "docs/your_code.md": (
    (
      "| field that takes `package.module:name` | what your code is | what dpjax "
      "still guards |"
    ),
    "| library | parameters | inside the loss |",
    "| library | in the loss of ONE example |",
    "| `--config.writer` | what happens |",
    "| library | what the model needs |",
    "| library | called with | what it returns sees | names in `params.npz` |",
  ),
  "docs/your_data.md": (
    "| `--config.data.name=` | what it reads | what is public about it | command |",
    "| key | what it says |",
    "| the target | task in `result.json` | loss of one example | scores |",
    "| you have | write |",
    "| `--config.model.name` | tokens | what is trained |",
    "| split | a row that is taken out of the file moves |",
    "| `--config.data.name=` | what it reads |",
    "| where | how |",
    "| question | answer |",
  ),
  "results/README.md": (
    "| folder | command | hardware |",
    "| row | config and flags for one seed |",
    "| page | when and where |",
  ),
  "THREATS.md": (
    "| attack | target | access | what defends |",
    (
      "| threat | secure sum (`secure.sums`) | shares (`secure.mpc`) | ciphertexts "
      "(`secure.homomorphic`) | trusted execution (not in dpjax) |"
    ),
    "| access | means |",
    "| attack | who | carried out by | source |",
  ),
}
_OF_WORDS = {(page, head) for page, heads in _HEADS.items() for head in heads}
_TABLES = [
  pytest.param(table, id=f"{table.page}: {table.head[0]}") for table in tables.TABLES
]


def _read(page: str) -> str:
  return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("table", _TABLES)
def test_a_table_is_that_of_its_file(table):
  text = _read(table.page)
  assert tables.written(text, table) == text, "run: python -m tests.tables"


def _stranger(page: str, block: str) -> bool:
  """Whether a table is neither made from results nor known to hold no measurement."""
  head = block.splitlines()[0]
  made = {tables.line(table.head) for table in tables.TABLES if table.page == page}
  return head not in made and (page, head) not in _OF_WORDS


@pytest.mark.parametrize("page", [*_PAGES, "results/README.md", "THREATS.md"])
def test_every_table_is_known(page):
  text = _read(page)
  assert not [block for block in tables.blocks(text) if _stranger(page, block)]
  assert not re.search(r"<table|<!--", text)


def test_a_table_of_invented_numbers_is_seen():
  for wrong in (
    "| SVHN | 1 |\n|---|---|\n| ours | .99 |\n",
    " data | 1\n---|---\nours | .99\n",
    "> | SVHN | 1 |\n> |---|---|\n> | ours | .99 |\n",
    "| SVHN | 1 |\n|---|\t---|\n| ours | .99 |\n",
    "| command | what it does | at epsilon 1 |\n|---|---|---|\n| ours | .99 | .98 |\n",
  ):
    (block,) = tables.blocks(f"Text.\n\n{wrong}\nMore.\n")
    assert block == wrong and _stranger("README.md", block)


def test_a_row_that_does_not_look_like_one_is_seen():
  table = next(table for table in tables.TABLES if table.page == "docs/toolbox.md")
  cells = tables.made(table)
  for more in (" | ours | .99 | .99 | .99 |\n", "| ours | .99 | .99 | .99\n", "ours\n"):
    page = f"Text.\n\n{cells}{more}\nMore.\n"
    assert tables.written(page, table) == f"Text.\n\n{cells}\nMore.\n"


# --- files of one folder


_NOT_KEPT = {"distributed_noise_digits", "federated_mnist"}  # runs of these two, once
_CURVES = [path.parent for path in sorted((ROOT / "results").rglob("curve.csv"))]
_SWEEPS = [path.name for path in _CURVES if path.name not in _NOT_KEPT]


def _points(rows: list[dict], x: str, y: str) -> dict[tuple, dict[str, float]]:
  """Means over seeds of a sweep's runs: (line, x) -> what its CSV must hold."""
  values = collections.defaultdict(list)
  for row in rows:
    place = row.get(x)
    if x == "privacy.epsilon" and row["epsilon_kind"] == "none":
      place = None
    line = str(row.get("variant", "")).split(" @ ")[0]
    values[line, None if place is None else float(place)].append(row)
  made = {}
  for at, of in values.items():
    found = [row[y] for row in of]
    made[at] = {"seeds": len(of), f"{y}_mean": sum(found) / len(of)}
    made[at] |= {f"{y}_min": min(found), f"{y}_max": max(found)}
    if x == "num_steps":
      continue
    kinds = {row["epsilon_kind"] for row in of}
    assert len(kinds) == 1 and len({row["seed"] for row in of}) == len(of), at
    made[at] |= {"epsilon": max((row["epsilon"] or 0) for row in of)}
    names = ("epsilon_kind", "delta", "neighboring_relation", "unit")
    made[at] |= {name: of[0][name] for name in names}
  return made


def _told(value: str) -> float | str | None:
  try:
    return float(value) if value else None
  except ValueError:
    return value


@pytest.mark.parametrize("folder", _SWEEPS)
def test_a_curve_is_that_of_its_runs(folder):
  rows, points = tables.runs(folder), tables.entries(f"{folder}/curve.csv")
  known = ("privacy.epsilon", "partition.alpha", "num_steps", "privacy.l2_clip_norm")
  known += ("optimizer.learning_rate",)
  (x,) = set(known) & points[0].keys()
  (y,) = {name[:-5] for name in points[0] if name.endswith("_mean")}
  expected = _points(rows, x, y)
  found = {(row.get("variant", ""), _told(row[x])): row for row in points}
  if "variant" not in points[0]:  # what a variant sets is x itself
    expected = {("", at): of for (_, at), of in expected.items()}
  assert found.keys() == expected.keys()
  for at, wanted in expected.items():
    for name, value in wanted.items():
      stated = _told(found[at][name])
      stated = stated or 0.0 if name == "epsilon" else stated
      near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
      assert stated == near, (at, name)


@pytest.mark.parametrize(
  "folder", ["mnist_curves", "fashion_mnist_curves", "cifar10_curves"]
)
def test_curves_are_of_the_promise_that_their_page_says(folder):
  assert "at delta 1e-5" in _read("docs/curves.md")
  for row in tables.entries(f"{folder}/curve.csv"):
    if row["privacy.epsilon"]:
      relation = "replace_special" if "DP-FTRL" in row["variant"] else "add_or_remove_one"
      promised = tuple(row[name] for name in ("epsilon_kind", *_NEIGHBOURS))
      assert promised == ("proved", relation, "example", "1e-05"), row
      assert float(row["epsilon"]) <= float(row["privacy.epsilon"])


_RADP = sorted(path.parent.name for path in (ROOT / "results").glob("radp/*/claims.csv"))


@pytest.mark.parametrize("folder", _RADP)
def test_claims_are_those_of_their_runs(folder):
  """Means over seeds, and the losses by epoch, which end where the runs did."""
  runs = json.loads((ROOT / f"results/radp/{folder}/results.json").read_text())
  names = ("curve", "dataset", "epsilon_target", "seed")
  points, last = collections.defaultdict(list), {}
  for run in runs:
    points[tuple(run[name] for name in names[:3])].append(run)
    last[tuple(str(run[name]) for name in names)] = run["test_loss"], run["test_accuracy"]
  expected = sorted(
    (curve, data, len(of), sum(run["test_accuracy"] for run in of) / len(of))
    for (curve, data, _), of in points.items()
  )
  found = sorted(
    (row["method"], row["dataset"], int(row["seeds"]), float(row["test_accuracy"]))
    for row in tables.entries(f"radp/{folder}/claims.csv")
  )
  assert [row[:3] for row in found] == [row[:3] for row in expected]
  assert [row[3] for row in found] == pytest.approx([row[3] for row in expected])
  ended = {
    tuple(row[name] for name in names): (row["test_loss"], row["test_accuracy"])
    for row in tables.entries(f"radp/{folder}/report.csv")  # its epochs are in order
  }
  assert ended.keys() == last.keys()
  for at, values in last.items():
    assert tuple(map(float, ended[at])) == pytest.approx(values), at


_OF_GRADIENTS = [
  path.relative_to(ROOT / "results").as_posix()
  for pattern in ("gradients/*.csv", "h100/gradients_*.csv")
  for path in sorted((ROOT / "results").glob(pattern))
]


@pytest.mark.parametrize("file", _OF_GRADIENTS)
def test_ratios_of_gradients_are_those_of_their_seconds(file):
  rows = tables.entries(file)
  ordinary = {row["workload"]: row for row in rows if row["method"] == "ordinary"}
  columns = {
    "median_s": "ratio", "buffer_bytes": "memory_ratio", "compile_s": "compile_ratio"
  }  # fmt: skip
  for row in rows:
    for value, ratio in columns.items():
      if row.get(ratio):
        base = float(ordinary[row["workload"]][value])
        assert float(row[ratio]) == pytest.approx(float(row[value]) / base, rel=1e-6), row


def test_minutes_of_whole_runs_are_those_of_their_steps():
  for row in tables.entries("training/training.csv"):
    minutes = float(row["median_s"]) * int(row["num_steps"]) / 60
    assert float(row["minutes"]) == pytest.approx(minutes)


# --- folders


def _kept() -> set[str]:
  """Every file under results/ that git has or would take, and that is there."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "results"]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  if found.returncode:
    pytest.skip("not a checkout of git")
  there = {path for path in found.stdout.split() if (ROOT / path).exists()}
  return {path.removeprefix("results/") for path in there} - {"README.md"}


def _published() -> list[str]:
  """Experiments of relevance, which have a folder each."""
  found = [path.stem for path in sorted((ROOT / "configs/radp").glob("*.py"))]
  return [name for name in found if not name.startswith(("__", "common", "quickstart"))]


def _patterns() -> list[str]:
  """Files and folders that the first column of results/README.md names."""
  head = "| folder | command | hardware |"
  every = tables.blocks(_read("results/README.md"))
  (table,) = (block for block in every if block.splitlines()[0] == head)
  made = []
  for line in table.splitlines()[2:]:
    names = re.findall(r"`([^`]+)`", line.split(" | ")[0])
    assert names, line
    first = names[0].rpartition("/")[0]  # "`secure/sums`, `regression`": of one folder
    made += [names[0], *(n if "/" in n else f"{first}/{n}" for n in names[1:])]
  made.remove("radp/NAME")
  return [*made, *(f"radp/{name}" for name in _published())]


def test_every_row_of_the_results_has_its_files_and_every_file_a_row():
  kept = _kept()
  rows = {name: {file for file in kept if _of(file, name)} for name in _patterns()}
  assert not [name for name, files in rows.items() if not files]
  assert not kept.difference(*rows.values())


def _of(file: str, name: str) -> bool:
  """Whether a row that names a file, with or without its ending, or a folder means this file."""
  above = map(str, (pathlib.PurePath(file), *pathlib.PurePath(file).parents))
  return any(fnmatch.fnmatch(path, form) for path in above for form in (name, f"{name}.*"))


@pytest.mark.parametrize("page", [*_PAGES, "CHANGELOG.md", "results/README.md"])
def test_results_that_a_page_names_are_there(page):
  for name in re.findall(r"`(results/[\w./*-]+)`", _read(page)):
    assert list(ROOT.glob(name.rstrip("/"))), name


# --- sentences


def _says(page: str, words: str) -> bool:
  """Whether a page has these words, with no digit more on either side."""
  text = " ".join(_read(page).split())
  return re.search(rf"(?<![\d.]){re.escape(words)}(?!\d)", text) is not None


_NEIGHBOURS = ("neighboring_relation", "unit", "delta")
_PROMISED = [  # a page, what it says of a table's runs, their file, and that in its columns
  (
    "README.md", "add/remove-one, per example, delta 1e-5", "mnist_scatter_linear",
    ("add_or_remove_one", "example", "1e-05"),
  ),
  (
    "docs/federated.md",
    "delta 1e-4, Poisson sampling of users, add/remove-one per user, means of three seeds",
    "fed_user_level", ("add_or_remove_one", "user", "0.0001"),
  ),
  (
    "docs/federated.md", "The same two lines and settings on Fashion-MNIST",
    "fed_user_level_fashion_mnist", ("add_or_remove_one", "user", "0.0001"),
  ),
  (
    "docs/federated.md", "On CIFAR-10, 25 images a user",
    "fed_user_level_cifar10", ("add_or_remove_one", "user", "0.0001"),
  ),
  (
    "docs/toolbox.md", "replace_special, delta 1e-5", "mnist_algorithms",
    ("replace_special", "example", "1e-05"),
  ),
  (
    "docs/language_models.md", "private per line (delta 1e-5, claimed", "lm_lora",
    ("add_or_remove_one", "example", "1e-05"),
  ),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words", "folder", "columns"), _PROMISED)
def test_promises_in_sentences_are_those_of_their_files(page, words, folder, columns):
  assert _says(page, words)
  rows = [row for row in tables.entries(f"{folder}/curve.csv") if row["epsilon"]]
  assert {tuple(row[name] for name in _NEIGHBOURS) for row in rows} == {columns}


@pytest.mark.parametrize(
  ("page", "words"),
  [
    ("README.md", "Mean over three seeds, smallest to largest in brackets"),
    ("docs/curves.md", "Means of three seeds, where nothing else is said, at delta 1e-5"),
    ("docs/curves.md", "one run each, one change at a time"),
    ("docs/federated.md", "not the same objective; one seed;"),
    ("docs/toolbox.md", "One seed each"),
    ("docs/language_models.md", "One seed, 200 steps"),
    ("docs/relevance.md", "Three seeds; the paper's numbers are the largest over epochs"),
    ("docs/relevance.md", "Means of three seeds"),
  ],
)
def test_seeds_in_sentences_are_those_that_the_tables_are_held_to(page, words):
  assert _says(page, words)


_SECONDS = [  # a page, its words about the seconds of a run, the sweep
  ("docs/federated.md", "{low} to {high} s a run", "fed_user_level"),
  ("configs/sweeps/fed_user_level.py", "{low} to {high} s a run", "fed_user_level"),
  ("docs/federated.md", "{low} to {high} s a run", "fed_user_level_fashion_mnist"),
  (
    "configs/sweeps/fed_user_level_fashion_mnist.py",
    "{low} to {high} s a run",
    "fed_user_level_fashion_mnist",
  ),
  ("docs/federated.md", "{low} to {high} s a run", "fed_user_level_cifar10"),
  (
    "configs/sweeps/fed_user_level_cifar10.py",
    "{low} to {high} s a run",
    "fed_user_level_cifar10",
  ),
  ("configs/mnist_scatter_cnn.py", "{low} to {high} s", "scatter_cnn"),
  ("configs/sweeps/scatter_cnn.py", "{low} to {high} s a run", "scatter_cnn"),
  ("configs/sweeps/fed_dirichlet.py", "{low} to {high} s a run", "fed_dirichlet"),
  ("configs/mnist_whitened.py", "{low} to {high} s", "mnist_whitened"),
  ("configs/sweeps/mnist_whitened.py", "{low} to {high} s a run", "mnist_whitened"),
  ("configs/fashion_mnist_whitened.py", "{low} to {high} s", "fashion_mnist_whitened"),
  (
    "configs/sweeps/fashion_mnist_whitened.py",
    "{low} to {high} s a run",
    "fashion_mnist_whitened",
  ),
  ("configs/sweeps/ablations_cifar10.py", "{low} to {high} s a run", "ablations_cifar10"),
  ("configs/sweeps/mnist_algorithms.py", "{low} to {high} s a run", "mnist_algorithms"),
  ("configs/lm_lora.py", "{low} to {high} s a run", "lm_lora"),
]


@pytest.mark.parametrize(("page", "words", "folder"), _SECONDS)
def test_seconds_of_a_run_are_those_of_its_file(page, words, folder):
  seconds = [row["wall_seconds"] for row in tables.runs(folder)]
  assert _says(page, words.format(low=f"{min(seconds):.0f}", high=f"{max(seconds):.0f}"))


def test_steps_on_machines_are_those_of_their_files():
  one, two = (
    f"{1e3 * float(row['median_s']):.0f}" for row in tables.entries("training/devices.csv")
  )
  memory = tables.entries("training/allocator.csv")
  kept, given = (
    f"{1e3 * float(tables.one(memory, workload='wide', method=method)['step_s']):.0f}"
    for method in ("kept", "returned")
  )
  assert _says("docs/machines.md", f"({two} ms for {one},")
  assert _says("docs/machines.md", f"{kept} ms for {given} (")


def test_the_membership_line_is_that_of_the_attacked_run():
  rows = tables.entries("attacks/membership_cifar10/attacks.csv")
  (noise,) = {row["noise_multiplier"] for row in rows if row["epsilon_kind"] == "proved"}
  assert _says("docs/attacks.md", f"--noise_multiplier={float(noise):.6f}")
  by = {(row["defence"], row["method"]): float(row["tpr_at_0.001_fpr"]) for row in rows}
  order = ("lira_fixed", "lira", "rmia", "loss")
  cells = " | ".join(f"{tables.percent(by['none', method])} %" for method in order)
  assert _says("docs/attacks.md", f"| without privacy | {cells} |")
  best = max(rate for (defence, _), rate in by.items() if defence != "none")
  assert _says("docs/attacks.md", f"under DP-SGD at epsilon 8 {tables.percent(best)} %")


def test_the_last_audit_is_as_its_page_says():
  rows = tables.entries("audits/table.csv")
  games = json.loads((ROOT / "results/audits/result.json").read_text())["rows"]
  bounds = [(of["what"], game["epsilon_lower"]) for of in games for game in of["games"]]
  audited = [(row["what"], float(row["strongest lower bound (99.9 %)"])) for row in rows]
  assert [what for what, _ in audited] == [what for what, _ in bounds]
  assert [b for _, b in audited] == pytest.approx(
    [b for _, b in bounds], rel=1e-3, abs=1e-3
  )
  assert all(
    float(row["claim: epsilon"]) >= bound for row, (_, bound) in zip(rows, audited)
  )
  assert _says("docs/audits.md", f"In the last table {len(games)} claims stand")
  text = (ROOT / "results/audits/final_model_mnist/final_model.json").read_text()
  known, unknown = (json.loads(text)["bounds"][name] for name in ("gdp", "clopper_pearson"))
  assert _says("docs/audits.md", f"epsilon >= {known:.2f} of the claimed 10")
  assert _says("docs/audits.md", f"({unknown:.2f} without that)")
