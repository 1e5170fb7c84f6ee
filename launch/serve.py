"""Serve a finished run over HTTP, watch it for drift, and release the next one by stages.

  python -m launch.serve --run=runs/quickstart --port=8080
  curl -s localhost:8080/predict -H 'Content-Type: application/json' -d '{"rows": [...]}'
  python -m launch.serve --run=runs/X --run=runs/Y --weights=.9,.1 --drift_inputs=mean

The first --run answers. The second one is released by stages, to a growing share of requests. Rules
decide when the share grows, and when the run is taken back (--stages, --stage_requests,
--error_rate, --latency_ms, --stage_labels, --accuracy_drop). The key of a request decides which
model it gets.

Drift is the population stability index (PSI) of answers and of --drift_inputs over public bins, for
each window of --window rows, against --reference. With --drift_epsilon every window is noisy and
accounted.

--workdir holds the journal: stages, alarms, windows, and the epsilon that is spent. A service that
was killed goes on where it was with the same command. The journal is as private as the requests.
Requests have neither encryption nor a password: put a proxy before any --host that others can
reach.
Needs pip install -e '.[serve]'. docs/serve.md has every field of requests and answers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys

from absl import flags

from dpjax.experiments.run import writers
from dpjax.validate import UserError
from launch import app

flags.DEFINE_multi_string(
  "run", [], "Folder of a finished run; twice to release the second."
)
flags.DEFINE_list("weights", None, "Shares of requests of the two runs, as .9,.1.")
flags.DEFINE_string("workdir", None, "Folder of the journal (default: runs/serve_<run>).")
flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
flags.DEFINE_integer("port", 8080, "Port; 0: a free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_integer(
  "max_rows", 256, "Most rows of a request.", lower_bound=1, upper_bound=65536
)
flags.DEFINE_float(
  "max_mb", 4.0, "Largest body, in MB.", lower_bound=0.001, upper_bound=256
)
flags.DEFINE_integer(
  "max_queue", 4096, "Most rows that wait.", lower_bound=1, upper_bound=10**6
)
flags.DEFINE_float("wait_ms", 2.0, "Milliseconds that a request waits for others.")
flags.DEFINE_float("deadline", 5.0, "Seconds within which a request is answered.")
flags.DEFINE_multi_string(
  "drift_inputs",
  [],
  "Inputs to watch: a column, mean or x[3,0], with edges as age:18,40,65.",
)
flags.DEFINE_bool("drift", True, "Watch answers and --drift_inputs.")
flags.DEFINE_integer(
  "window", 1000, "Rows of a window of drift.", lower_bound=1, upper_bound=10**9
)
flags.DEFINE_integer(
  "feedback_window",
  200,
  "Labels of a window of accuracy.",
  lower_bound=1,
  upper_bound=10**9,
)
flags.DEFINE_float(
  "window_seconds",
  None,
  "Seconds of a window of accuracy, as 3600; in place of --feedback_window.",
)
flags.DEFINE_float("psi_warning", 0.1, "PSI above which a window is warned of.")
flags.DEFINE_float("psi_alarm", 0.25, "PSI above which a window raises an alarm.")
flags.DEFINE_string(
  "reference",
  "stream",
  "What windows are compared with: stream, training, public:NAME or FILE.json.",
)
flags.DEFINE_float(
  "reference_epsilon",
  None,
  "With --reference=training: epsilon of the noise on its counts.",
)
flags.DEFINE_bool(
  "exact_reference", False, "With --reference=training: no noise, and no epsilon any more."
)
flags.DEFINE_float(
  "drift_epsilon", None, "Epsilon of the noise on every window, for one row."
)
flags.DEFINE_float("drift_budget", None, "Epsilon of all windows together.")
flags.DEFINE_float(
  "latency_ms", 200.0, "Bound on the 99th percentile of milliseconds; 0: none."
)
flags.DEFINE_float("accuracy_drop", 0.05, "By how much an accuracy may fall.")
flags.DEFINE_list(
  "stages", ["0.1", "0.5"], "Shares of requests of a new run, stage by stage."
)
flags.DEFINE_integer(
  "stage_requests", 1000, "Requests of a stage.", lower_bound=1, upper_bound=10**9
)
flags.DEFINE_float("stage_seconds", 0.0, "Shortest duration of a stage.")
flags.DEFINE_float(
  "error_rate", 0.01, "Largest share of requests that a new run may fail on."
)
flags.DEFINE_integer(
  "stage_labels", 0, "Labels that a stage waits for.", lower_bound=0, upper_bound=10**9
)
flags.DEFINE_string(
  "token_file", None, "File with the token that POST /release must bring."
)


def _shares(name: str) -> tuple[float, ...]:
  """Returns the numbers of a flag that lists them between commas."""
  listed: list[str] = getattr(flags.FLAGS, name)
  try:
    return tuple(float(part) for part in listed)
  except ValueError:
    raise UserError(
      "must be numbers between commas", field=name, value=",".join(listed)
    ) from None


def _stages(num_runs: int) -> tuple[float, ...]:
  """Returns the shares of requests at each stage of a release. If --weights is given, it sets the
  first share, and only larger shares of --stages follow."""
  from dpjax.serving import rollout

  stages = _shares("stages")
  if flags.FLAGS.weights is None:
    return stages
  weights = _shares("weights")
  if num_runs != 2:
    raise UserError("would be ignored, it needs two --run", field="weights", value=weights)
  rollout.check_weights(weights, num_runs)
  return (weights[1], *(stage for stage in stages if stage > weights[1]))


def _token() -> str | None:
  path = flags.FLAGS.token_file
  if path is None:
    return None
  try:
    token = pathlib.Path(path).read_text(encoding="ascii").strip()
  except (OSError, ValueError) as error:
    raise UserError(
      f"cannot be read as text ({type(error).__name__})", field="token_file", value=path
    ) from None
  if len(token) < 16:
    raise UserError(
      "must hold a token of at least 16 characters", field="token_file", value=path
    )
  return token


def main() -> None:
  """Loads the runs, and serves until it is stopped."""
  values = flags.FLAGS
  if len(values.run) not in (1, 2):
    raise UserError(
      "must be given once, or twice to release the second", field="run", value=values.run
    )
  from dpjax.serving import http

  if http.MISSING:
    raise UserError(
      f"launch.serve needs {http.MISSING[0]}; pip install -e '.[serve]' in dpjax's clone"
    )
  from dpjax.serving import drift, references
  from dpjax.serving.journal import ServiceJournal
  from dpjax.serving.predictor import Predictor
  from dpjax.serving.rollout import StageRule
  from dpjax.serving.service import Service, ServiceSettings

  # Most mistakes in flags are reported before a model is loaded, which takes longer.
  shared = ("max_rows", "max_queue", "wait_ms", "deadline", "window", "feedback_window")
  shared += ("window_seconds", "psi_warning", "psi_alarm", "latency_ms", "accuracy_drop")
  shared += ("drift_epsilon", "drift_budget")
  rule = StageRule(
    stages=_stages(len(values.run)),
    requests=values.stage_requests,
    seconds=values.stage_seconds,
    error_rate=values.error_rate,
    latency_ms=values.latency_ms,
    labels=values.stage_labels,
    accuracy_drop=values.accuracy_drop,
  )
  settings = ServiceSettings(rule=rule, **{name: getattr(values, name) for name in shared})
  token = _token()
  asked = {"epsilon": values.reference_epsilon, "exact": values.exact_reference}
  references.check(values.reference, **asked)
  if values.window_seconds is not None:
    app.refuse_given(("feedback_window",), "no --window_seconds")
  if not values.drift:
    app.refuse_given(("drift_inputs", "reference", "drift_epsilon"), "--drift")
  runs = [Predictor.load(folder) for folder in values.run]
  bins = []
  if values.drift:
    bins = [drift.predicted_bins(runs[0].inputs)]
    bins += [drift.bins_of(text, runs[0].inputs) for text in values.drift_inputs]
  workdir = pathlib.Path(values.workdir or f"runs/serve_{runs[0].name}")
  with contextlib.ExitStack() as opened:
    # Some references need no journal: a mistake in one of them leaves no folder behind.
    journal = functools.cache(lambda: opened.enter_context(ServiceJournal(workdir)))
    reference = references.make(values.reference, runs[0], bins, journal, **asked)
    service = Service(runs, journal(), bins=bins, reference=reference, settings=settings)
    web = http.Web(service, most_bytes=round(values.max_mb * 2**20), token=token)
    if values.host not in ("127.0.0.1", "localhost", "::1"):
      writers.warn(
        f"--host={values.host}: others can reach it, without a password or encryption"
      )
    for run in runs:
      if run.differences:
        writers.note(
          f"{run.name}: may round otherwise than in training: {run.differences[0]}"
        )
    http.serve(web, host=values.host, port=values.port, ready=_ready)
  sys.stdout.flush()


def _ready(host: str, port: int) -> None:
  print(f"serving at http://{host}:{port} (process {os.getpid()})", flush=True)


if __name__ == "__main__":
  app.run(main)
