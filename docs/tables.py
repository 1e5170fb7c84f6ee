"""The measured tables of README and of the guide, made from the committed results.

  python docs/tables.py  # writes them into their pages

The site has them as they are made here, whatever a page says (docs/site.py). A row's label is
written here beside the row of the file that it stands for; papers' numbers are constants.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

Row = list[str]
ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = ROOT / "results"
_NONE = "–"


class Table(NamedTuple):
  """One table of a page."""

  page: str
  head: Row  # cells of its first line
  rows: Callable[[], list[Row]]


# --- files


@functools.cache
def entries(file: str) -> list[dict[str, str]]:
  """Of a CSV in results/."""
  with open(_RESULTS / file, newline="", encoding="utf-8") as lines:
    return list(csv.DictReader(lines))


def runs(folder: str) -> list[dict]:
  """The runs of a sweep in results/, none of which has failed."""
  rows = json.loads((_RESULTS / folder / "sweep.json").read_text())["rows"]
  assert all(row["status"] == "done" for row in rows), folder
  return rows


def one(rows: list[dict], **wanted: str) -> dict:
  """The only row with these values."""
  (found,) = (r for r in rows if all(r[key] == value for key, value in wanted.items()))
  return found


def _whole(page: str, file: str) -> Table:
  """A CSV in results/ as it is."""
  rows = entries(file)
  return Table(page, [*rows[0]], lambda: [[*row.values()] for row in rows])


# --- cells


def share(value: str | float, digits: int = 3) -> str:
  """An accuracy.

  >>> share(0.98765), share(1.0, 2)
  ('.988', '1.00')
  """
  return f"{float(value):.{digits}f}".removeprefix("0")


def percent(value: float) -> str:
  """
  >>> percent(0.0019), percent(0.067)
  ('.2', '6.7')
  """
  return f"{100 * value:.1f}".removeprefix("0")


def ratio(value: str | float) -> str:
  """
  >>> [ratio(value) for value in (0.6449, 1.996, 3.94, 201.3)]
  ['0.64x', '2.0x', '3.9x', '201x']
  """
  value = float(value)
  digits = 2 if value < 1.995 else 1 if value < 20 else 0
  return f"{value:.{digits}f}x"


def _few(value: str | float) -> str:
  """Two digits that count.

  >>> _few(0.199), _few(14.2), _few(68.1)
  ('.20', '14', '68')
  """
  value = float(value)
  return share(value, 2) if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _up(epsilon: float) -> str:
  """To two decimals, on the safe side.

  >>> _up(1.9998), _up(7.5296)
  ('2', '7.53')
  """
  return f"{math.ceil(100 * epsilon) / 100:g}"


def _range(mean: str | float, text: str, digits: int = 3) -> str:
  """Of "0.552-0.768" as `claims.csv` has it."""
  low, high = (share(value, digits) for value in text.split("-"))
  return f"{share(mean, digits)} [{low}, {high}]"


# --- README, published results


class _Published(NamedTuple):
  words: str  # of the config
  data: str
  folder: str
  epsilon: str
  paper: str = _NONE
  config: str = ""  # below configs/; "": the sweep of the folder's name
  variant: str = ""  # of the sweep; "": the name of the data
  network: str = ""  # the paper's own, as README calls it; "": not in README

  @property
  def path(self) -> str:
    """Of the config, below configs/."""
    return self.config or f"sweeps/{self.folder}"


_TB = "(Tramèr & Boneh 2021)"
_TB_SAME = "(Tramèr & Boneh 2021, the same network)"
_PAPERNOT = "(Papernot et al. 2021)"
_SCATTERING = "a linear model on scattering features"
_SIGMOIDS = "a CNN with tempered sigmoids, on pixels"
_WHITENED = ", private whitening within the budget"
_PUBLISHED = [
  _Published(_WHITENED, "MNIST", "mnist_whitened", "2"),
  _Published(
    _WHITENED, "MNIST", "mnist_whitened", "3", f".987 {_TB}", "mnist_whitened"
  ),
  _Published(
    "", "MNIST", "mnist_scatter_linear", "3", f".987 {_TB}", network=_SCATTERING
  ),
  _Published(
    _WHITENED, "Fashion-MNIST", "fashion_mnist_whitened", "3", f".897 {_TB}"
  ),
  _Published(
    "", "Fashion-MNIST", "fashion_mnist_scatter_linear", "3", f".897 {_TB}",
    "fashion_mnist_scatter_linear", network=_SCATTERING,
  ),
  _Published(
    ", opponent colours, private channel statistics within the budget", "CIFAR-10",
    "cifar10_scatter_linear", "3", f".670 {_TB}",
  ),
  _Published(
    ", features of patches of random images", "CIFAR-10", "cifar10_patches", "1",
    ".723 (Tang et al. 2023, on a GPU)", "cifar10_patches", "patches + linear",
  ),
  _Published(
    ", a tanh CNN on scattering features", "MNIST", "scatter_cnn", "2.93",
    f".987 at 3 {_TB_SAME}",
  ),
  _Published(
    "", "Fashion-MNIST", "scatter_cnn", "2.7",
    f".890 at 3 {_TB_SAME}; .861 (Papernot et al. 2021, on pixels)",
  ),
  _Published(
    ", tempered sigmoids on pixels", "MNIST", "mnist_cnn", "2.93", f".981 {_PAPERNOT}",
    network=_SIGMOIDS,
  ),
  _Published(
    "", "Fashion-MNIST", "mnist_cnn", "2.7", f".861 {_PAPERNOT}", network=_SIGMOIDS
  ),
]  # fmt: skip
_PROMISE = {  # of every published row and of the curves, where they say nothing else
  "delta": "1e-05",
  "epsilon_kind": "proved",
  "neighboring_relation": "add_or_remove_one",
  "unit": "example",
}
_DATA = {"MNIST": "mnist", "Fashion-MNIST": "fashion_mnist", "CIFAR-10": "cifar10"}


def _is_of(run: dict, row: _Published) -> bool:
  """Whether a run of the row's folder is behind the row."""
  near = run["privacy.epsilon"] == float(row.epsilon)
  return near and run["dataset"] == _DATA[row.data]


def _accuracy(row: _Published) -> str:
  """Mean, smallest and largest over three seeds."""
  points = entries(f"{row.folder}/curve.csv")
  wanted = {**_PROMISE, "privacy.epsilon": f"{float(row.epsilon)}"}
  if "variant" in points[0]:
    wanted["variant"] = row.variant or row.data
  point = one(points, seeds="3", **wanted)
  mean, low, high = (
    share(point[f"test_accuracy_{part}"]) for part in ("mean", "min", "max")
  )
  return f"{mean} [{low}, {high}]"


def _published_seconds(row: _Published) -> Row:
  """Seconds of the three runs behind a row."""
  seconds = [run["wall_seconds"] for run in runs(row.folder) if _is_of(run, row)]
  assert len(seconds) == 3, row
  return [
    f"`{row.path}`",
    row.data,
    row.epsilon,
    f"{min(seconds):.0f} to {max(seconds):.0f} s",
  ]


def _cifar10_cnn_run() -> dict:
  run = json.loads((_RESULTS / "cifar10_cnn/result.json").read_text())
  assert all(str(run[name]) == value for name, value in _PROMISE.items())
  return run


def _readme() -> list[Row]:
  """The same network as in a paper, beside it."""
  return [
    [
      row.data, f"[{row.network}](configs/{row.path}.py)", row.epsilon, row.paper, _accuracy(row)
    ]
    for row in _PUBLISHED
    if row.network
  ]  # fmt: skip


def _every_published() -> list[Row]:
  run = _cifar10_cnn_run()
  paper = ".662 (Papernot et al. 2021, longer)"
  accuracy = f"{share(run['test_accuracy'])}, one seed"
  link = "[`cifar10_cnn`](../configs/cifar10_cnn.py), 9 passes"
  rows = [
    [
      row.data, row.epsilon, row.paper, _accuracy(row),
      f"[`{row.path}`](../configs/{row.path}.py){row.words}",
    ]
    for row in _PUBLISHED
  ]  # fmt: skip
  return [*rows[:7], ["CIFAR-10", _up(run["epsilon"]), paper, accuracy, link], *rows[7:]]


def _seconds() -> list[Row]:
  run = _cifar10_cnn_run()
  cells = ["`cifar10_cnn`", "CIFAR-10", _up(run["epsilon"]), f"{run['wall_seconds']:.0f} s"]
  rows = [_published_seconds(row) for row in _PUBLISHED]
  return [*rows[:7], cells, *rows[7:]]


# --- curves


def _curve(
  folder: str, lines: dict[str, str], *, column: str = "privacy.epsilon", values: list[str],
  digits: int, seeds: int | None = None,
) -> list[Row]:  # fmt: skip
  """A line of cells for each line of a curve, all of so many seeds; None: 3, or the line says that
  it has one."""
  points = entries(f"{folder}/curve.csv")
  assert {row["variant"] for row in points} == set(lines.values()), folder
  assert {row[column] for row in points} == set(values), folder
  made = []
  for label, variant in lines.items():
    of = {row[column]: row for row in points if row["variant"] == variant}
    (count,) = {row["seeds"] for row in of.values()}
    assert int(count) in ((1, 3) if seeds is None else (seeds,)), (folder, label)
    shown = f"{label}, ONE seed" if seeds is None and count == "1" else label
    cells = (of[value]["test_accuracy_mean"] if value in of else None for value in values)
    made.append(
      [shown, *(_NONE if cell is None else share(cell, digits) for cell in cells)]
    )
  return made


_EPSILONS = ["0.1", "0.5", "1.0", "2.0", "4.0", "8.0", ""]
_HEADS = ["0.1", "0.5", "1", "2", "4", "8"]
_PLAIN = {
  "whitened": "whitened scattering + linear",
  "plain": "scattering + linear",
  "plain, random allocation": "the same, random allocation",
  "plain, DP-FTRL": "the same, DP-FTRL",
  "CNN on the features": "scattering + tempered-sigmoid CNN",
}
_PIXELS = {"CNN on pixels": "tempered-sigmoid CNN"}
_EQUIVARIANT = {"C4-equivariant CNN on pixels": "C4-equivariant CNN"}
_OPPONENT = {
  "opponent colours, private channel statistics": "opponent scattering + linear",
  "the same, random allocation": "the same, random allocation",
  "the same, DP-FTRL": "the same, DP-FTRL",
  "CNN on the same features": "the same features, CNN",
}


def _of_data(
  data: str, lines: dict[str, str], folder: str, *, linked: bool = True
) -> Table:
  files = (
    f"([extremes](../results/{folder}/curve.csv), [picture](../results/{folder}/curve.png))"
  )
  head = [f"{data} {files}" if linked else data, *_HEADS, "inf"]
  make = functools.partial(_curve, folder, lines, values=_EPSILONS, digits=4)
  return Table("docs/curves.md", head, make)


def _of_users(head: str, folder: str, features: str = "scattering + linear") -> Table:
  lines = {"linear on pixels": "linear", "linear on scattering features": features}
  make = functools.partial(_curve, folder, lines, values=_EPSILONS, digits=3, seeds=3)
  return Table("docs/federated.md", [head, *_HEADS, "no noise"], make)


_ABLATIONS = {
  "none": "C4 network",
  "no symmetry, as wide (C1)": "no symmetry, as wide (C1)",
  "turns and mirrors (D4), as wide": "turns and mirrors (D4)",
  "no normalisation of channels": "no normalisation",
  "pixels normalised by private statistics": "private statistics of the pixels",
  "parameters averaged, decay .95": "averaged parameters (.95)",
  "cosine schedule of the learning rate": "cosine schedule",
  "batches of 256, 400 steps": "batches of 256, 400 steps",
  "batches of 4,096, 25 steps": "batches of 4,096, 25 steps",
  "two augmented copies of an example (shifts, mirrors)": "two augmented copies",
  "head sees the mean over positions": "head sees the mean over positions",
}


def _perplexities() -> list[Row]:
  untouched = "(the public model, untouched; measured once, no file kept)"
  made = [[untouched, "5.996", ".468"]]
  for label, value in {"1": 1.0, "3": 3.0, "8": 8.0, "not private": None}.items():
    (run,) = (
      run
      for run in runs("lm_lora")
      if (run["privacy.epsilon"] if run["epsilon_kind"] != "none" else None) == value
    )
    made.append([label, f"{run['test_perplexity']:.3f}", share(run["test_accuracy"])])
  return made


# --- federated


def _rounds() -> list[Row]:
  rows = [
    ("CNN, IID, E=5 B=10", "99 %", "20", "CNN, IID"),
    ("2NN, IID, E=1 B=10", "97 %", "87", "2NN, IID"),
    ("2NN, two shards a client", "97 %", "664", "2NN, two shards"),
  ]
  points = entries("fed_mcmahan/curve.csv")
  made = []
  for label, target, paper, variant in rows:
    point = one(points, variant=variant)
    assert float(point["test_accuracy_mean"]) >= float(target.split()[0]) / 100
    made.append([label, target, paper, f"{float(point['num_steps']):.0f}"])
  return made


# --- gradients


_WORKLOADS = {  # label: (workload, batch)
  "small CNN, 28x28": ("small_cnn", "256"),
  "linear, scattering features": ("scatter_linear", "4096"),
  "CNN on scattering features": ("scatter_cnn", "1024"),
  "CIFAR CNN": ("cifar_cnn", "128"),
  "WRN-16-4, standardised kernels": ("wrn", "64"),
  "MLP 784-1024-1024-10": ("mlp", "256"),
  "MLP 784-4096-4096-10": ("wide_mlp", "512"),
  "GPT, 4 layers, T 128": ("gpt", "16"),
  "GPT, tied embeddings, LoRA": ("gpt_lora", "16"),
  "ViT-Tiny/4, 32x32": ("vit", "64"),
  "LSTM, T 64": ("lstm", "64"),
  "mixture of 2 experts": ("few_experts", "64"),
  "mixture of 16 experts": ("experts", "64"),
}
_NOT_ASKED = {"few_experts", "experts"}  # of Opacus, which has no rule for them


def _timed(rows: list[dict[str, str]], workload: str, *methods: str) -> str:
  """The best of the methods; what it says where none could run."""
  if "opacus" in methods and workload in _NOT_ASKED:
    return "cannot"
  found = [r for r in rows if r["workload"] == workload and r["method"] in methods]
  times = [float(row["ratio"]) for row in found if row["status"] == "ok"]
  if times:
    return ratio(min(times))
  said = " ".join(row["status"] for row in found)
  size = re.search(r"take (\d+ GB)", said)
  return size[1] if size else "cannot" if "Opacus" in said else _NONE


def _speeds() -> list[Row]:
  before = [
    *entries("gradients/gradients.csv"),
    *(r for r in entries("gradients/fourth_run.csv") if r["workload"] == "scatter_cnn"),
  ]
  made = []
  for label, (workload, batch) in _WORKLOADS.items():
    now = one(entries("gradients/ninth_run.csv"), workload=workload, method="auto")
    cells = [_timed(before, workload, name) for name in ("auto", "vmap", "jax_privacy")]
    cells.append(_timed(before, workload, "opacus", "opacus_ghost"))
    more = [f"{float(now[name]):.1f}x" for name in ("memory_ratio", "compile_ratio")]
    made.append([label, batch, *cells, ratio(now["ratio"]), *more])
  return made


def _compiled() -> list[Row]:
  """Clipped gradients as compiled for one chip of each kind, against the ordinary gradient."""
  rows = entries("compiled/compiled.csv")
  labels = {workload: label for label, (workload, _) in _WORKLOADS.items()}
  made = []
  for workload, label in labels.items():
    of = {
      (row["target"][:3], row["method"]): row for row in rows if row["workload"] == workload
    }
    if all(method == "ordinary" for _, method in of):
      continue
    batch = next(iter(of.values()))["batch"]
    cells = []
    for platform in ("tpu", "gpu"):
      for method in ("auto", "vmap"):
        row = of.get((platform, method))
        # The ordinary gradient, or the method, may not fit, or may not have been compiled.
        if row is None or row["status"] != "ok" or not row["memory_ratio"]:
          said = _NONE if row is None else row["status"]
          cells.append(re.sub(r"does not fit: (.*)", r"\1, too much", said))
        else:
          bound = ratio(row["roofline_ratio"])
          cells.append(f"{bound}, {ratio(row['memory_ratio'])}")
    made.append([f"{label}, {int(batch):,}", *cells])
  return made


def _plans() -> list[Row]:
  """What `--dry_run --target` says of whole runs."""
  rows = entries("compiled/plans.csv")
  return [
    [
      f"`configs/{row['config']}.py`"
      + f", microbatches of {row['microbatch_size']}" * bool(row["microbatch_size"]),
      f"`{row['target']}`",
      f"{float(row['held_gb']):.2g} GB",
      f"{1e3 * float(row['sent_gb_a_step']):.0f} MB",
      f"{60 * float(row['hours_at_least']):.2g} min",
    ]
    for row in rows
  ]


def _on_a_card() -> list[Row]:
  """Clipped gradients on an H100, over the ordinary gradient timed in the same way."""
  rows = entries("h100/gradients_now.csv")
  kernels = {
    row["workload"]: float(row["kernel_s"])
    for row in entries("h100/kernels.csv")
    if row["method"] == "auto"
  }
  of_before = {
    row["workload"]: ratio(row["ratio"])
    for row in entries("h100/gradients_before.csv")
    if row["method"] == "auto"
  }
  made = []
  for label, (workload, _) in _WORKLOADS.items():
    of = {row["method"]: row for row in rows if row["workload"] == workload}
    if not of:
      continue
    base = float(of["ordinary"]["median_s"])
    cells = [
      f"{1e3 * base:.2f} ms",
      of_before.get(workload, _NONE),
      ratio(of["auto"]["ratio"]),
    ]
    cells.append(ratio(kernels[workload] / base) if workload in kernels else _NONE)
    cells.append(ratio(of["auto"]["memory_ratio"]))
    is_run = of["vmap"]["status"] == "ok"
    for column in ("ratio", "memory_ratio"):
      cells.append(ratio(of["vmap"][column]) if is_run else _NONE)
    made.append([label, *cells])
  return made


def _ways_of_convolutions() -> list[Row]:
  """Milliseconds of a convolution's gradient, and of the clipped one in three ways."""
  rows = [r for r in entries("h100/parts.csv") if r["kind"] == "convolutions"]
  made = []
  for shape in dict.fromkeys(row["shape"] for row in rows):
    mine = {
      r["way"]: f"{1e3 * float(r['seconds']):.2f}" for r in rows if r["shape"] == shape
    }
    ways = ("ordinary", "grouped", "patches", "gram")
    made.append([shape, *(mine.get(way, _NONE) for way in ways)])
  return made


def _ways_of_products() -> list[Row]:
  """Teraflops per second of products of float32 matrices, by precision."""
  rows = entries("h100/parts.csv")
  made = []
  for kind, words in (("products", "product"), ("grams", "rows with themselves")):
    mine = [row for row in rows if row["kind"] == kind]
    for shape in dict.fromkeys(row["shape"] for row in mine):
      of = {r["way"]: _few(float(r["rate"]) / 1e12) for r in mine if r["shape"] == shape}
      made.append([f"{words}, {shape}", of["default"], of["highest"], of["tf32 x3"]])
  return made


def _microbatches() -> list[Row]:
  rows = entries("gradients/seventh_run.csv")
  made = []
  for label in ("CNN on scattering features", "small CNN, 28x28", "CIFAR CNN"):
    workload, batch = _WORKLOADS[label]
    of = {row["method"]: row for row in rows if row["workload"] == workload}
    times = [ratio(of[name]["ratio"]) for name in ("auto", "microbatches", "plain_loop")]
    memory = [ratio(of[name]["memory_ratio"]) for name in ("auto", "microbatches")]
    made.append([f"{label.split(',')[0]}, {batch}", *times, *memory])
  return made


def _minutes() -> list[Row]:
  configs = {
    "`mnist_cnn`, in microbatches of 128": "mnist_cnn",
    "`mnist_cnn`, the whole batch at once": "mnist_cnn_whole",
    "`cifar10_cnn`, in microbatches of 128": "cifar10_cnn",
  }
  rows = entries("training/training.csv")
  assert {row["config"] for row in rows} == set(configs.values())
  made = []
  for label, config in configs.items():
    vmap, auto = (one(rows, config=config, method=name) for name in ("vmap", "auto"))
    minutes = [float(row["minutes"]) for row in (vmap, auto)]
    cells = [f"{value:.1f} min" if value < 20 else f"{value:.0f} min" for value in minutes]
    made.append([label, f"{int(auto['num_steps']):,}", *cells])
  return made


# --- relevance


_CLAIMS = {"MNIST": "radp/test1_mnist", "Fashion-MNIST": "radp/test2_fashion_mnist",
           "CIFAR-10": "radp/test3_cifar10"}  # fmt: skip


def _claim(folder: str, method: str, epsilon: float) -> dict[str, str]:
  """Of the table of claims, at a target of epsilon, of three seeds."""
  near = lambda row: abs(float(row["claimed_epsilon"] or "inf") - epsilon) < 0.01
  rows = [row for row in entries(f"{folder}/claims.csv") if near(row)]
  return one(rows, method=method, seeds="3")


def _test_1() -> list[Row]:
  rows = [("RADP (P3)", "RADP", ".949"), ("AdLM", "AdLM", ".914"),
          ("DPDLIGDO (= DP-Adam)", "DPDLIGDO", ".921"), ("DPSGD", "DPSGD", ".903")]  # fmt: skip
  number = lambda text: f"{float(text):.1f}" if text else _NONE
  made = []
  for label, method, paper in rows:
    row = _claim(_CLAIMS["MNIST"], method, 2.0)
    proved = _up(float(row["proved_epsilon"])) if row["proved_epsilon"] else "none"
    accuracy = _range(row["test_accuracy"], row["accuracy_range"])
    shown = number(row["audited_lower_bound"])
    made.append(
      [label, paper, accuracy, number(row["epsilon_by_theorem_7"]), proved, shown]
    )
  return made


def _departures() -> list[Row]:
  """One seed; labels in words are the page's own."""
  words = {
    "P3": "as in our tests",
    "no entropy floor": "the paper's entropies",
    "relevance floor .1/d": "a lower floor of the noisy relevance",
    "positive relevance": "max(R, 0) in place of absolute R",
    "all records": "60,000 in place of 10,000",
  }
  three = lambda number: f"{number:.3f}".lstrip("0")
  made = []
  for run in json.loads((_RESULTS / "radp/departures_mnist/results.json").read_text()):
    numbers = [three(run["test_accuracy"]), f"{run['test_loss']:.2f}".lstrip("0")]
    numbers += [three(run["test_squared_error"]), three(run["accuracy_oscillation"])]
    made.append([f"{run['curve']}: {words[run['curve']]}", *numbers])
  return made


def _loss(folder: str, method: str, epsilon: str) -> str:
  """Mean, smallest and largest over seeds after the last epoch."""
  rows = entries(f"{folder}/report.csv")
  rows = [r for r in rows if r["curve"] == method and r["epsilon_target"] == epsilon]
  last = max(int(row["epoch"]) for row in rows)
  found = [float(row["test_loss"]) for row in rows if int(row["epoch"]) == last]
  assert len(found) == 3
  return f"{sum(found) / 3:.2f} [{min(found):.2f}, {max(found):.2f}]"


def _tests_2_and_3() -> list[Row]:
  rows = [("Fashion-MNIST", "5.0", "accuracy", ".858"), ("CIFAR-10", "12.0", "loss", "1.124"),
          ("CIFAR-10", "12.0", "accuracy", _NONE)]  # fmt: skip

  def cell(folder: str, method: str, epsilon: str, what: str) -> str:
    if what == "loss":
      return _loss(folder, method, epsilon)
    row = _claim(folder, method, float(epsilon))
    return _range(row["test_accuracy"], row["accuracy_range"])

  made = []
  for data, epsilon, what, paper in rows:
    ours, honest = (cell(_CLAIMS[data], name, epsilon, what) for name in ("RADP", "DPSGD"))
    made.append([f"{data} at {float(epsilon):g}, {what}", ours, paper, honest])
  return made


_PROVED = {
  "mnist": (0.5, 1.5, 2.0),
  "fashion_mnist": (1.5, 3.0, 5.0),
  "cifar10": (2.0, 8.0, 12.0),
}


def _proved() -> list[Row]:
  names = {"rigorous RADP": ("RADP, proved", 2), "DP-SGD": ("DP-SGD", 3),
          "relevance, then DP-SGD": ("RADP + DP-SGD", 3)}  # fmt: skip
  made = []
  for label, (method, digits) in names.items():
    cells = []
    for data, epsilons in _PROVED.items():
      rows = [_claim(f"radp/proved_{data}", method, epsilon) for epsilon in epsilons]
      assert all(abs(float(r["proved_epsilon"]) - e) < 0.01 for r, e in zip(rows, epsilons))
      cells.append(" / ".join(share(row["test_accuracy"], digits) for row in rows))
    made.append([label, *cells])
  return made


# --- attacks, secure sums


def _exactly(rows: list[dict[str, str]]) -> str:
  """How many records each found exactly: "24 of 24 (0.86-1.00) exactly, ...\"."""
  found = [re.match(r"(\d+ of \d+) \S+ exactly", row["finds"]) for row in rows]
  assert all(found), rows
  return ", ".join(match[1] for match in found if match is not None)


def _leakage() -> list[Row]:
  rows = entries("attacks/leakage_scores/attacks.csv")
  made = []
  for data, paper in (("MNIST", ".82 / 76 %"), ("CIFAR-10", ".68 / 54 %")):
    dlg = [one(rows, attack="DLG", defence=f"{data} LeNet batch 1")]
    of = lambda size, data=data: f"{data} batch {size}"
    dense = [one(rows, attack="dense layer first", defence=of(size)) for size in (1, 4, 16)]
    cells = []
    for found, score in (
      (dlg, "gls_recovered"),
      (dense, "gls_recovered"),
      (dense, "gls_dense"),
    ):
      scores = ", ".join(share(row[score]) for row in found)
      nulls = ", ".join(share(row[f"{score}_null"], 2) for row in found)
      cells.append(f"{scores} (null{'s' if len(found) > 1 else ''} {nulls})")
    cells[:2] = [f"{cells[0]}, {_exactly(dlg)}", f"{cells[1]}, {_exactly(dense)}"]
    made.append([data, paper, *cells])
  return made


def _rogue() -> list[Row]:
  """Images that a server's own model shows, by defence."""
  rows = entries("attacks/rogue_server_cifar10/attacks.csv")
  defences = ("none", "clipping", "secure sum of 4", "4 local steps", "top-k", "noise 2")
  return [
    [defence, _exactly([one(rows, attack="rogue server", defence=defence)])]
    for defence in defences
  ]


def _fishing() -> list[Row]:
  """Images that a server shows with its bins alone, and where it fishes for a class as well."""
  rows = entries("attacks/fishing_cifar10/attacks.csv")
  return [
    [
      defence,
      *(
        _exactly([one(rows, attack=attack, defence=defence)])
        for attack in ("bins", "fishing and bins")
      ),
    ]
    for defence in ("none", "clipping", "secure sum of 4", "epsilon 8")
  ]


def _exposure() -> list[Row]:
  """Mean bits of the canaries, by training and copies, and what its guarantee allows."""
  rows = entries("attacks/exposure/exposure.csv")
  cells = []
  for training in dict.fromkeys(row["training"] for row in rows):
    alike = [row for row in rows if row["training"] == training]
    bits = []
    for copies in ("0", "1", "4", "16"):
      canaries = [row for row in alike if row["copies"] == copies]
      mean = sum(float(row["bits"]) for row in canaries) / len(canaries)
      allowed = canaries[0]["allowed_mean"]
      bits.append(f"{mean:.1f} ({float(allowed):.1f})" if allowed else f"{mean:.1f}")
    cells.append([training, alike[0]["perplexity"], *bits])
  return cells


def _lines_read() -> list[Row]:
  """What the messages of clients show of their text."""
  cells = []
  for row in entries("attacks/text_from_gradients/lines.csv"):
    # With noise the attack names a token at each position, and no line.
    is_noisy = float(row["noise_multiplier"] or 0) > 0
    whole = "" if is_noisy else f"{row['lines_right']} of {row['lines_in_all']}"
    tokens = f"{row['tokens_right']} of {row['tokens']}"
    cells.append(
      [row["message"], row["lines"], row["noise_multiplier"] or "none", tokens, whole]
    )
  return cells


def _sums() -> list[Row]:
  made = []
  for clients in ("10", "100"):
    size = {"clients": clients, "length": "1000000", "dropped": "0", "status": "ok"}
    rows = [
      one(entries("secure/sums.csv"), method=name, **size)
      for name in ("additive_servers", "secagg", "secagg_plus", "bfv")
    ]
    made.append([f"{clients} x 1e6", *(_few(row["seconds"]) for row in rows)])
  return made


def _sum_messages() -> list[Row]:
  """What one client sends in a secure sum, and what a member of a committee does beside."""
  size = {"clients": "100", "length": "1000000"}
  rows = entries("secure/sum_messages.csv")
  names = {
    "secagg": "SecAgg",
    "secagg_plus": "SecAgg+",
    "additive_servers": "shares, 2 servers",
  }
  megabytes = lambda count: f"{int(count) / 1e6:.1f}"
  cells = []
  for row in rows:
    if row["role"] != "client" or (row["clients"], row["length"]) != tuple(size.values()):
      continue
    members = (
      [one(rows, method=row["method"], role="member", **size)]
      if (row["method"].startswith("committee"))
      else []
    )
    traffic = [
      megabytes(m[key]) for m in members for key in ("sent_bytes", "received_bytes")
    ]
    cells.append([
      names.get(row["method"], row["method"]), row["messages"], megabytes(row["sent_bytes"]),
      *(traffic or [_NONE, _NONE]),
    ])  # fmt: skip
  return cells


def _membership() -> list[Row]:
  """Members that each attack finds, in percent."""
  rows = entries("attacks/membership_cifar10/attacks.csv")
  labels = {"none": "without privacy", "epsilon 8": "DP-SGD at epsilon 8"}
  cells = []
  for defence, label in labels.items():
    rates = [
      one(rows, defence=defence, method=method)["tpr_at_0.001_fpr"]
      for method in ("lira_fixed", "lira", "rmia", "loss")
    ]
    cells.append([label, *(f"{percent(float(rate))} %" for rate in rates)])
  return cells


def _inversion() -> list[Row]:
  """DLG under noise of the client."""
  rows = entries("attacks/gradient_inversion_cifar10/attacks.csv")
  cells = []
  for label, sigma in (("none", ""), ("1e-6", "1e-06"), ("1e-5", "1e-05"), ("1e-4", "0.0001"),
                       ("1e-3", "0.001")):  # fmt: skip
    defence = f"sigma {sigma}" if sigma else "none"
    row = one(rows, attack="DLG", defence=defence)
    exact = re.match(r"(\d+) of 8", row["finds"])
    recognisable = re.search(r"(\d+) of 8 records recovered", row["verdict"])
    assert exact is not None, row
    cells.append([label, exact[1], recognisable[1] if recognisable else "0"])
  return cells


def _shares() -> list[Row]:
  """Accuracies on shares beside those in the clear."""
  network = json.loads((_RESULTS / "secure/secureml.json").read_text())[
    "network_784_128_128_10"
  ]
  minutes = f"{network['seconds'] / 60:.1f}"
  label = f"SecureML's network 784-128-128-10, three epochs, {minutes} minutes"
  accuracies = [network[f"accuracy_{kind}"] for kind in ("on_shares", "plain")]
  return [[label, *(share(accuracy, 4) for accuracy in accuracies)]]


def _noisy_models() -> list[Row]:
  """Accuracies by epsilon of a model opened from shares, beside DP-SGD."""
  rows = [
    row for row in entries("secure/output_noise.csv") if row["data"] == "breast_cancer"
  ]
  methods = ("on shares, noise on the output", "DP-SGD in the clear")
  cells = []
  for epsilon in ("0.1", "0.5", "1.0", "3.0", "8.0"):
    pair = (one(rows, method=method, epsilon=epsilon) for method in methods)
    cells.append([f"{float(epsilon):g}", *(share(row["accuracy"]) for row in pair)])
  return cells


def _files() -> list[Row]:
  """What reading from files costs, beside memory."""
  rows = entries("data/data.csv")
  kinds = ("arrays", "images")
  large = {kind: one(rows, kind=kind, records="1000000", place="files") for kind in kinds}
  small = {kind: one(rows, kind=kind, records="10000", place="files") for kind in kinds}
  ratios = [share(large[kind]["ratio"], 2) for kind in kinds]
  more = [
    (int(large[kind]["peak_rss_bytes"]) - int(small[kind]["peak_rss_bytes"])) / 1e6
    for kind in kinds
  ]
  return [
    ["a step on a million records in files, as a share of one from memory", *ratios],
    ["more memory than on ten thousand records", *(f"{value:.0f} MB" for value in more)],
  ]


def _rounds_beside_a_loop() -> list[Row]:
  """Time of a federated round against a bare loop of jitted local steps."""
  ours = entries("federated/second_run.csv")
  before = entries("federated/federated.csv")
  sources = {
    "dpjax": (ours, "threads"),
    "dpjax in one thread": (ours, "loop"),
    "FedJAX, beside an older version of ours": (before, "fedjax"),
  }
  cells = []
  for label, (rows, method) in sources.items():
    ratios = [
      one(rows, workload=workload, method=method, num_clients="40")["ratio"]
      for workload in ("cnn", "mlp")
    ]
    cells.append([label, *(share(value, 2) for value in ratios)])
  return cells


# --- all of them


# --- correlated noise


def _noise_left() -> list[Row]:
  """Computed, not measured: error on prefix sums times sensitivity, by dpjax itself."""
  from dpjax.accounting import matrix
  from dpjax.noise import correlated
  from dpjax.noise.correlated import series

  strategies = {
    "`banded`, a band for each step of a pass, at most 32": lambda steps: correlated.Banded(
      bands=min(steps, 32)
    ),
    "`band_inv_mf`, 4 draws": lambda _: correlated.BandInvMf(bands=4),
    "`lambda_cgd`, 2 draws": lambda _: correlated.LambdaCgd(),
    "`bifr`, 4 draws": lambda _: correlated.Bifr(bands=4),
    "`bisr`, 4 draws": lambda _: correlated.Bisr(bands=4),
    "`bisr`, 16 draws": lambda _: correlated.Bisr(bands=16),
  }

  def error(choice, num_steps: int, steps_apart: int) -> float:
    strategy = choice.make(num_steps, steps_apart)
    column = strategy.multiply([[1.0]] + [[0.0]] * (num_steps - 1))[:, 0]
    costs = matrix.participation_costs(
      strategy, num_steps=num_steps, steps_apart=steps_apart, cyclic=True
    )
    return math.sqrt(series.prefix_error(column, num_steps) * costs[-1])

  runs_of = [(300, 15), (2000, 100), (800, 800)]
  white = [error(correlated.White(), *run) for run in runs_of]
  return [
    [name, *(share(error(make(run[1]), *run) / of) for run, of in zip(runs_of, white))]
    for name, make in strategies.items()
  ]


_NOISE_AND_BATCHES = {
  "white, Poisson (DP-SGD)": "DP-SGD",
  "`banded`, in a public order": "banded",
  "`band_inv_mf`, drawn again": "band_inv_mf, nothing kept",
  "`banded`, sampled in turns": "banded, sampled in turns",
}


def _with_ranges(folder: str, lines: dict[str, str], values: list[str]) -> list[Row]:
  """Means of three seeds, each with the least and the largest."""
  points = entries(f"{folder}/curve.csv")
  assert {row["variant"] for row in points} == set(lines.values()), folder
  assert {row["seeds"] for row in points} == {"3"}

  def cell(variant: str, epsilon: str) -> str:
    row = one(points, variant=variant, **{"privacy.epsilon": epsilon})
    mean, least, most = (
      share(row[f"test_accuracy_{of}"], 4) for of in ("mean", "min", "max")
    )
    return f"{mean} ({least}-{most})"

  return [[label, *(cell(variant, x) for x in values)] for label, variant in lines.items()]


_COSTS = {
  "white noise": "white",
  "`banded`, 32 bands": "banded_32",
  "`bisr`, 32 draws, kept": "bisr_32_kept",
  "`bisr`, 32 draws, drawn again": "bisr_32",
  "`band_inv_mf`, 4 draws, drawn again": "band_inv_mf_4",
  "`lambda_cgd`, drawn again": "lambda_cgd",
}


def _scripts() -> list[Row]:
  """Existing scripts, and what each library changes in them."""
  libraries = {"ordinary": "", "jax_privacy": "JAX-Privacy 2.0", "opacus": "Opacus 1.6"}
  names = {"nnx": "Flax nnx", "equinox": "Equinox", "torch": "PyTorch"}
  made = []
  for row in entries("peers/lines_changed.csv"):
    framework, _, library = row["script"].partition("_")
    words = [names[framework], libraries.get(library, library)]
    score = f"{share(row['accuracy'])} ± {share(row['sd'])}"
    label = ", ".join(filter(None, words))
    made.append(
      [label, row["lines"], row["new"], row["gone"], score, row["epsilon"] or _NONE]
    )
  return sorted(
    made, key=lambda row: ([*names.values()].index(row[0].split(",")[0]), int(row[1]))
  )


def _load_of_a_service() -> list[Row]:
  """What a service did under load, by what happened to it."""
  found = json.loads((_RESULTS / "serve" / "serve.json").read_text(encoding="utf-8"))
  return [
    [
      phase["name"],
      f"{phase['seconds']:.0f}",
      f"{phase['requests']:,}",
      f"{phase['p50_ms']:.1f}",
      f"{phase['p99_ms']:.1f}",
      f"{phase['lost']}",
    ]
    for phase in found["phases"]
  ]


def _draws() -> list[Row]:
  """Bytes for each parameter: moved and held for a while by an absent machine, held by a CPU."""
  words = {
    "jax_normal": "`jax.random.normal`",
    "ordinary": "dpjax, `dpjax.new_key()`",
    "threefry2x32": "dpjax, `jax.random.key(seed)`",
    "release": "dpjax, `dpjax.new_key(release=True)`",
    "redrawn_4": "correlated, four draws, three of them again",
  }
  entries_of = entries("training/draws.csv")

  def cell(method: str, target: str) -> str:
    row = one(entries_of, tree="leaf_10m", method=method, target=target)
    size = float(row["parameters"])
    held = round(float(row["temporary_bytes"]) / size)
    return f"{held}" if not target else f"{float(row['moved_bytes']) / size:.0f}, {held}"

  machines = ("", "tpu:v5e:1x1", "gpu:h100:1")
  return [
    [word, *(cell(name, machine) for machine in machines)] for name, word in words.items()
  ]


def _noise_costs() -> list[Row]:
  rows = entries("training/correlated.csv")

  def cells(strategy: str) -> Row:
    row = one(rows, model="mlp_10m", strategy=strategy)
    held = f"{float(row['step_bytes']) / 1e6:,.0f} MB"
    return [row["draws"], row["copies"], held, ratio(row["bytes_ratio"])]

  return [[words, *cells(strategy)] for words, strategy in _COSTS.items()]


def _votes() -> list[Row]:
  """PATE on MNIST: the paper's row, then the runs, seeds of one setting together."""
  published = json.loads((_RESULTS / "pate" / "mnist.json").read_text())["published"]
  rows = [
    ["Papernot et al. 2018, Confident-GNMax", str(published["epsilon"]),
     "of the votes, in expectation", str(published["num_answers"]), _NONE,
     share(published["test_accuracy"])]
  ]  # fmt: skip
  settings: dict[tuple[str, str], list[dict[str, str]]] = {}
  for row in entries("pate/mnist.csv"):
    settings.setdefault((row["method"], row["epsilon"]), []).append(row)
  names = {"gnmax": "GNMax", "confident_gnmax": "Confident-GNMax"}
  for (method, epsilon), seeds in settings.items():
    answers = sorted({row["num_answers"] for row in seeds})
    means = [
      sum(float(row[name]) for row in seeds) / len(seeds)
      for name in ("label_accuracy", "test_accuracy")
    ]
    label = names[method] if len(seeds) == 1 else f"{names[method]}, {len(seeds)} seeds"
    rows.append([label, f"{float(epsilon):.2f}", "proved", *answers, *map(share, means)])
  return rows


def _distilled() -> list[Row]:
  """Distillation on MNIST: both networks of each setting, over all its seeds."""
  settings: dict[str, list[dict[str, str]]] = {}
  for row in entries("distillation/mnist.csv"):
    settings.setdefault(row["setting"], []).append(row)
  rows = []
  for setting, seeds in settings.items():
    assert len(seeds) == 3, setting
    cells = []
    for name in ("teacher_accuracy", "test_accuracy"):
      values = [float(row[name]) for row in seeds]
      mean = share(sum(values) / len(values))
      cells.append(f"{mean} ({share(min(values))}-{share(max(values))})")
    rows.append([setting, *cells])
  return rows


def _synthesis() -> list[Row]:
  """Synthetic MNIST: published rows, then the runs, seeds of one setting together."""
  published = json.loads((_RESULTS / "synthesis" / "mnist.json").read_text())["published"]
  names = ("accuracy_logistic_regression", "accuracy_mlp")
  rows = [
    [row["method"], row["epsilon"], row["seeds"], *(share(row[name]) for name in names),
     share(sum(row[name] for name in names) / 2)]
    for row in published
  ]  # fmt: skip
  settings: dict[tuple[str, str], list[dict[str, str]]] = {}
  for row in entries("synthesis/mnist.csv"):
    settings.setdefault((row["features"], row["epsilon"]), []).append(row)
  for (features, epsilon), seeds in settings.items():
    means = [
      sum(float(row[f"test_{name}"]) for row in seeds) / len(seeds) for name in names
    ]
    cells = [*map(share, means), share(sum(means) / 2)]
    rows.append([f"ours, {features}", f"{float(epsilon):g}", str(len(seeds)), *cells])
  return rows


def _samples_attacked() -> list[Row]:
  """The attack on synthetic MNIST beside what the proof allows, seed 0."""
  names = ("attack_tpr_at_fpr_0.01", "attack_tpr_at_fpr_0.01_high", "tpr_at_fpr_0.01")
  return [
    [f"{float(row['epsilon']):g}", *(share(row[name], 4) for name in names)]
    for row in entries("synthesis/mnist.csv")
    if row["seed"] == "0" and row["features"] == "moments and Fourier"
  ]


def _at_once() -> list[Row]:
  """Least squares in one release beside DP-SGD, on three kinds of inputs."""
  values = ["0.1", "0.2", "0.5", "1.0"]
  digits = _curve(
    "least_squares",
    {"digits, pixels, least squares": "least squares", "the same, DP-SGD": "DP-SGD"},
    values=values,
    digits=3,
    seeds=3,
  )
  released = {
    row["privacy.epsilon"]: row for row in entries("mnist_least_squares/curve.csv")
  }
  assert {row["seeds"] for row in released.values()} == {"3"}
  steps = {
    row["privacy.epsilon"]: row
    for row in entries("mnist_curves/curve.csv")
    if row["variant"] == "scattering + linear"
  }

  def cells(rows: dict[str, dict[str, str]]) -> Row:
    cell = lambda row: _NONE if row is None else share(row["test_accuracy_mean"])
    return [cell(rows.get(value)) for value in values]

  return [
    *digits,
    ["MNIST, scattering features, least squares", *cells(released)],
    ["the same, DP-SGD", *cells(steps)],
  ]


def _opponent_cells(values: list[str]) -> Row:
  """The line of CIFAR-10 on scattering features, which know no images."""
  rows = {
    row["privacy.epsilon"]: row
    for row in entries("cifar10_curves/curve.csv")
    if row["variant"] == "opponent scattering + linear"
  }
  cells = [
    share(rows[value]["test_accuracy_mean"]) if value in rows else _NONE for value in values
  ]
  return ["scattering features, opponent colours", *cells]


def _on_public_images() -> list[Row]:
  """Features of VGG16 beside those that know no public images."""
  larger = {
    "features of VGG16 of 96x96, claimed": "VGG16 at 96x96 + linear",
    "the same, least squares": "VGG16 at 96x96, least squares",
  }
  smaller = {"features of VGG16 of 48x48, claimed, from random weights": "VGG16 + linear"}
  values = ["0.1", "0.5", "1.0", "2.0", "3.0", "8.0"]
  # Run before the model started from zeros, and not at .1.
  earlier = _curve("cifar10_vgg", smaller, values=values[1:], digits=3, seeds=3)
  return [
    *_curve("cifar10_vgg_96", larger, values=values, digits=3, seeds=3),
    *([label, _NONE, *cells] for label, *cells in earlier),
    _opponent_cells(values),
  ]


def _on_patches() -> list[Row]:
  """Features of patches beside those of scattering, which know no images either."""
  values = ["0.1", "0.5", "1.0", "2.0", "3.0", "4.0", "8.0"]
  lines = {"features of patches": "patches + linear"}
  known = _curve("cifar10_patches", lines, values=values, digits=3, seeds=3)
  return [*known, _opponent_cells(values)]


def _versions() -> list[Row]:
  names = ("python", "jax", "flax", "numpy", "passed", "failed", "skipped")
  return [
    [f"{int(row[n]):,}" if n in names[4:] else row[n] for n in names]
    for row in entries("versions/table.csv")
  ]


def _expected() -> list[Row]:
  """The interval of one more run, of each cheap config."""
  made = []
  for row in entries("expected/expected.csv"):
    is_share = row["score"] == "test_accuracy"
    cell = share if is_share else (lambda value: f"{float(value):.1f}")
    path = row["config"].replace(".", "/")
    made.append(
      [
        f"[`{path}`](../configs/{path}.py)",
        row["score"].removeprefix("test_"),
        _up(float(row["epsilon"])),
        f"{cell(row['mean'])} ± {cell(row['sd'])}",
        f"[{cell(row['low'])}, {cell(row['high'])}]",
        row["runs"],
        row["day"],
      ]
    )
  return made


def _table_settings() -> list[Row]:
  """Log loss on tables, by table."""
  rows = entries("table_settings/table.csv")
  before = entries("table_settings/quickstart.csv")
  made = []
  for name in dict.fromkeys(row["table"] for row in rows):
    of = {row["epsilon"]: row for row in rows if row["table"] == name}
    first = of["1.0"]
    digits = one(before, table=name, epsilon="1.0")
    losses = [of[epsilon]["loss"] for epsilon in ("1.0", "3.0", "8.0")]
    beside = [first["constant_loss"], first["logistic_loss"], digits["loss"]]
    made.append([name, f"{int(first['rows']):,}", *map(share, losses), *map(share, beside)])
  return made


_CARRIED = {  # label: (folder, line)
  "`voices`, accuracy": ("voices", "utterance"),
  "`mortgages`, AUROC": ("mortgages", "all applicants"),
  "of its black applicants": ("mortgages", "black applicants"),
  "of the others": ("mortgages", "others"),
  "`insurance`, AUROC": ("insurance", "customer"),
  "`smartwatch`, accuracy, in one place": ("smartwatch", "recordings, in one place"),
  "each person's own device": ("smartwatch", "recordings, on each person's device"),
  "private for whole people, at delta .01": ("smartwatch", "whole people"),
}


_CARRIED_RUNS = {"voices": "30"}


def _carried() -> list[Row]:
  """Mean and sd by epsilon, of ten runs each, or as the page says."""
  made = []
  for label, (folder, line) in _CARRIED.items():
    rows = [
      row for row in entries(f"carried/{folder}/by_epsilon.csv") if row["line"] == line
    ]
    of = {row["privacy.epsilon"]: row for row in rows}
    assert {row["seeds"] for row in rows} == {_CARRIED_RUNS.get(folder, "10")}, label
    cells = (of[epsilon] for epsilon in ("1.0", "3.0", "8.0", ""))
    made.append([label, *(f"{share(row['mean'])} ± {share(row['sd'])}" for row in cells)])
  return made


TABLES = [
  Table(
    "docs/expected.md",
    ["config", "score", "epsilon", "mean ± sd", "one more run lies in", "runs", "last met"],
    _expected,
  ),
  Table(
    "docs/your_data.md",
    [
      "table", "rows", "epsilon 1", "3", "8", "shares of the classes",
      "logistic regression, not private", "digits' settings at 1",
    ],
    _table_settings,
  ),
  Table(
    "docs/your_data.md",
    ["data, score", "epsilon 1", "epsilon 3", "epsilon 8", "clipped, no noise"],
    _carried,
  ),
  Table(
    "docs/curves.md",
    ["CIFAR-10, a linear model on", "0.1", "0.5", "1", "2", "3", "4", "8"],
    _on_patches,
  ),
  Table(
    "docs/finetune.md",
    ["CIFAR-10, a linear model on", "0.1", "0.5", "1", "2", "3", "8"],
    _on_public_images,
  ),
  Table(
    "docs/finetune.md", ["film reviews, accuracy", "0.5", "1", "2", "4", "8"],
    lambda: _curve(
      "movie_reviews", {"DP-SGD": "DP-SGD", "least squares": "least squares"},
      values=["0.5", "1.0", "2.0", "4.0", "8.0"], digits=3, seeds=3,
    ),
  ),
  Table(
    "docs/pate.md",
    ["", "epsilon", "kind", "labels", "right labels", "accuracy"],
    _votes,
  ),
  Table("docs/distillation.md", ["setting", "teacher", "student"], _distilled),
  Table(
    "docs/synthesis.md",
    ["method", "epsilon", "seeds", "logistic regression", "network", "mean of both"],
    _synthesis,
  ),
  Table(
    "docs/synthesis.md",
    [
      "epsilon", "TPR at FPR .01 of the attack", "its upper end at 95 %",
      "most that the proof allows",
    ],
    _samples_attacked,
  ),
  Table("README.md", ["data", "network and config", "epsilon", "paper", "ours"], _readme),
  Table(
    "results/README.md", ["data", "epsilon", "paper", "ours", "config"], _every_published
  ),
  Table("results/README.md", ["config", "data", "epsilon", "time a run"], _seconds),
  _of_data("MNIST", _PLAIN | _PIXELS | _EQUIVARIANT, "mnist_curves", linked=False),
  Table("docs/curves.md", ["inputs, method", "0.1", "0.2", "0.5", "1"], _at_once),
  _of_data("Fashion-MNIST", _PLAIN | _PIXELS | _EQUIVARIANT, "fashion_mnist_curves"),
  _of_data("CIFAR-10", _OPPONENT | _PIXELS | _EQUIVARIANT, "cifar10_curves"),
  Table(
    "docs/curves.md", ["change", "accuracy"],
    lambda: _curve("ablations_cifar10", _ABLATIONS, values=["3.0"], digits=3, seeds=1),
  ),
  Table(
    "docs/curves.md", ["clipping", "first norm .05", ".5", "5"],
    lambda: _curve(
      "clip_rules",
      {"constant": "constant", "adaptive (quantile)": "adaptive (quantile)", "slack": "slack"},
      column="privacy.l2_clip_norm", values=["0.05", "0.5", "5.0"], digits=3, seeds=3,
    ),
  ),
  Table(
    "docs/curves.md", ["scaling", "rate .125", ".25", ".5", "1"],
    lambda: _curve(
      "scaled_coordinates",
      {"none": "not scaled", "by outputs, floor .1": "scaled, floor .1",
       "by outputs, floor .5": "scaled, floor .5"},
      column="optimizer.learning_rate", values=["0.125", "0.25", "0.5", "1.0"], digits=3, seeds=3,
    ),
  ),
  _of_users("model", "fed_user_level"),
  _of_users("Fashion-MNIST", "fed_user_level_fashion_mnist"),
  _of_users("CIFAR-10", "fed_user_level_cifar10", "opponent scattering + linear"),
  Table("docs/federated.md", ["", "target", "paper", "ours"], _rounds),
  Table(
    "docs/federated.md", ["", "alpha 0.1", "0.5", "IID"],
    lambda: _curve(
      "fed_dirichlet",
      {"FedAvg": "FedAvg", "FedProx, mu 0.1": "FedProx", "FedNova": "FedNova",
       "SCAFFOLD": "SCAFFOLD"},
      column="partition.alpha", values=["0.1", "0.5", "inf"], digits=3, seeds=1,
    ),
  ),
  Table(
    "docs/gradients.md",
    ["workload", "batch", "dpjax auto", "dpjax vmap", "jax-privacy 2.0", "Opacus 1.6, best mode",
     "auto, now", "memory, now", "compile, now"],
    _speeds,
  ),
  Table(
    "docs/gradients.md",
    ["workload, batch", "whole batch", "16 microbatches", "plain `scan`",
     "memory, whole batch", "memory, microbatches"],
    _microbatches,
  ),
  Table(
    "docs/accelerators.md",
    ["bound, memory, over the ordinary", "TPU v5e, auto", "vmap", "H100, auto", "its vmap"],
    _compiled,
  ),
  Table(
    "docs/accelerators.md",
    ["run", "machine", "memory of a device", "sent by each in a step", "at least"],
    _plans,
  ),
  Table(
    "docs/accelerators.md",
    ["H100", "ordinary", "auto, before", "auto", "its kernels alone", "its memory", "vmap",
     "its memory"],
    _on_a_card,
  ),
  Table(
    "docs/accelerators.md",
    ["convolution, ms", "ordinary", "grouped", "patches", "gram products"],
    _ways_of_convolutions,
  ),
  Table(
    "docs/accelerators.md",
    ["float32 matrices, Tflop/s", "TF32, the default", "float32", "three of TF32"],
    _ways_of_products,
  ),
  Table("docs/gradients.md", ["config", "steps", "by vmap", "by auto"], _minutes),
  Table(
    "docs/language_models.md",
    ["epsilon", "perplexity a character, private test lines", "next character"],
    _perplexities,
  ),
  Table(
    "docs/relevance.md",
    ["one change", "accuracy", "cross-entropy", "squared error", "oscillation"],
    _departures,
  ),
  Table(
    "docs/relevance.md",
    ['MNIST at "epsilon 2"', "the paper", "ours", "by its theorem 7", "proved",
     "an attack shows at least"],
    _test_1,
  ),
  Table(
    "docs/relevance.md", ["", "RADP, claimed", "the paper's RADP", "DP-SGD, proved"], _tests_2_and_3
  ),
  Table(
    "docs/relevance.md",
    ["", "MNIST .5 / 1.5 / 2", "Fashion-MNIST 1.5 / 3 / 5", "CIFAR-10 2 / 8 / 12"],
    _proved,
  ),
  Table(
    "docs/attacks.md",
    ["", "published", "DLG on LeNet, batch 1: correlation with what is found, recovered exactly",
     "first dense layer, batch 1, 4, 16: the same",
     "correlation with the best of its units, which needs the record"],
    _leakage,
  ),
  Table(
    "docs/secure.md",
    ["sum of n vectors of d numbers, seconds of all parties", "shares, 2 servers", "SecAgg",
     "SecAgg+", "BFV"],
    _sums,
  ),
  Table(
    "docs/secure.md",
    ["one of 100 clients, 1e6 numbers", "messages", "MB sent", "MB sent by a member",
     "MB received by a member"],
    _sum_messages,
  ),
  Table(
    "docs/attacks.md",
    ["training", "LiRA, one variance for all", "LiRA, one for each record", "RMIA",
     "the loss alone"],
    _membership,
  ),
  Table("docs/attacks.md", ["noise, in clip norms", "exact", "recognisable"], _inversion),
  Table("docs/attacks.md", ["defence", "images recovered exactly"], _rogue),
  Table(
    "docs/attacks.md", ["defence", "by bins alone", "by fishing for one class"], _fishing
  ),
  Table(
    "docs/attacks.md",
    ["training", "perplexity", "never there", "1 copy", "4 copies", "16 copies"],
    _exposure,
  ),
  Table(
    "docs/attacks.md",
    ["message", "lines", "noise multiplier", "tokens read", "whole lines"],
    _lines_read,
  ),
  Table("docs/secure.md", ["MNIST", "on shares", "in the clear"], _shares),
  Table(
    "docs/secure.md",
    ["epsilon", "on shares, noise on the output", "DP-SGD in the clear"],
    _noisy_models,
  ),
  Table("docs/your_data.md", ["on two cores", "arrays", "PNG images"], _files),
  Table(
    "docs/federated.md",
    ["seconds of a round, beside a bare Python loop of jitted local steps", "CNN", "MLP"],
    _rounds_beside_a_loop,
  ),
  Table(
    "docs/toolbox.md", ["algorithm", "epsilon 1", "epsilon 2", "epsilon 8"],
    lambda: _curve(
      "mnist_algorithms",
      {"DP-SGD, Poisson": "DP-SGD",
       "DP-FTRL, banded noise, fixed public order (no sampling to trust)": "DP-FTRL, banded",
       "DP-Adam, second moment corrected": "DP-Adam", "DP-SGLD": "DP-SGLD"},
      values=["1.0", "2.0", "8.0"], digits=3, seeds=1,
    ),
  ),
  Table(
    "docs/correlated.md",
    ["noise and batches", "epsilon 1", "2", "4", "8"],
    lambda: _with_ranges(
      "correlated_noise", _NOISE_AND_BATCHES, ["1.0", "2.0", "4.0", "8.0"]
    ),
  ),
  Table(
    "docs/correlated.md",
    ["noise and batches, CIFAR-10", "epsilon 1", "8"],
    lambda: _with_ranges("correlated_noise_cifar10", _NOISE_AND_BATCHES, ["1.0", "8.0"]),
  ),
  Table(
    "docs/correlated.md",
    ["strategy", "20 passes of 15 steps", "20 passes of 100 steps", "one pass of 800 steps"],
    _noise_left,
  ),
  Table(
    "docs/correlated.md",
    ["noise", "draws in a step", "copies kept", "memory of a step", "of white noise"],
    _noise_costs,
  ),
  Table("docs/accelerators.md", ["noise", "CPU: held", "TPU v5e", "H100"], _draws),
  Table(
    "docs/serve.md",
    ["phase", "seconds", "requests", "p50 ms", "p99 ms", "lost"],
    _load_of_a_service,
  ),
  Table(
    "docs/getting_started.md",
    ["Python", "jax", "flax", "numpy", "passed", "failed", "skipped"],
    _versions,
  ),
  Table(
    "docs/coming_from.md",
    ["script", "lines", "new", "gone", "accuracy", "epsilon, printed"],
    _scripts,
  ),
  _whole("docs/accounting.md", "accounting/one_pass.csv"),
  _whole("docs/accounting.md", "accounting/bins.csv"),
  _whole("docs/sampling.md", "accounting/k_out_of_t.csv"),
  _whole("docs/sampling.md", "accounting/batches_of_600.csv"),
  _whole("docs/overflow.md", "accounting/padding.csv"),
]  # fmt: skip


def line(cells: Row) -> str:
  """
  >>> line(["", "target"])
  '| | target |'
  """
  return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def blocks(text: str) -> list[str]:
  """Every table of a page: all lines from its head to the next empty one, which Markdown takes as
  its rows, whatever they look like."""
  head, rule = r"^[^\n]*\|[^\n]*\n", r"[ \t>]*\|?[ \t:|-]*-[ \t:|-]*\n"
  return re.findall(rf"{head}{rule}(?:[^\n]+\n?)*", text, re.MULTILINE)


def made(table: Table) -> str:
  """As it stands in its page."""
  rule = "|" + "---|" * len(table.head)
  return "\n".join([line(table.head), rule, *map(line, table.rows())]) + "\n"


def written(text: str, page: str) -> str:
  """A page with its tables as their files have them; one without such a head keeps what it has."""
  for table in TABLES:
    if table.page == page:
      for old in blocks(text):
        if old.splitlines()[0] == line(table.head):
          text = text.replace(old, made(table))
  return text


def main() -> None:
  """Writes all tables."""
  for page in sorted({table.page for table in TABLES}):
    path = ROOT / page
    path.write_text(written(path.read_text(encoding="utf-8"), page), encoding="utf-8")


if __name__ == "__main__":
  main()
