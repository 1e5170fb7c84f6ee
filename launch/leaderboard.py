"""Writes the entry of finished runs for the leaderboard of private image classification.

  python -m launch.leaderboard results/cifar10_patches --out=entry.yml \\
    --name='Patches of random images' --authors='A. Researcher'

  # with a clone of the board: writes a copy of the board's file with the new entry to --out, and
  # prints which claims of the board are at least as good
  git clone https://github.com/Private-MachineLearning/Private-MachineLearning.github.io board
  python -m launch.leaderboard results/cifar10_patches --out=CIFAR10_no.yml --board=board \\
    --name='Patches of random images' --authors='A. Researcher'

Arguments that are no flags are folders of runs or of sweeps. Epsilons, deltas, accuracies and
accountants are read from their files. Runs that differ in their seed alone are one claim, their
mean. What the board's rules do not allow is refused: part of a data set, an epsilon that is not of
one image, a delta above 1e-5, and public data without their name. The board:
private-machinelearning.github.io (arXiv:2601.17189).
"""

from __future__ import annotations

import pathlib

from absl import flags

from dpjax import accounting, files, validate
from dpjax.experiments.sweeps import leaderboard
from launch import app

flags.DEFINE_string("out", None, "File to write, .yml.", required=True)
flags.DEFINE_string("name", None, "Title of the method, or of its paper.", required=True)
flags.DEFINE_string("authors", None, "Names of the authors.", required=True)
flags.DEFINE_string("url", "N/A", "Address of the paper.")
flags.DEFINE_string("code", "N/A", "Address of the code.")
flags.DEFINE_string("venue", "Unpublished", "Where the method was published.")
flags.DEFINE_string(
  "venue_date", "", "Day of publication, such as 2026-05-31. Default: today."
)
flags.DEFINE_string(
  "model", "", "Words for the model. Default: the variant's name in a sweep."
)
flags.DEFINE_string(
  "series", "", "Takes only variants of this name, the part before ' @ '."
)
flags.DEFINE_string(
  "data_set",
  None,
  f"Data set of the board: {', '.join(leaderboard.BOARDS)}. Default: that of the runs.",
)
flags.DEFINE_string(
  "public_data",
  "",
  "Public data that the model has seen, such as ImageNet-1K. Default: none.",
)
flags.DEFINE_string(
  "metric", "test_accuracy", "Key of the result; an AUC has auc in its name."
)
flags.DEFINE_string("board", None, "Folder of a clone of the board's repository.")


def main(*folders: str) -> None:
  """Writes the entry of the runs in these folders, and prints its claims."""
  values = flags.FLAGS
  out = pathlib.Path(values.out)
  if out.suffix != ".yml":
    raise validate.UserError("must end in .yml", field="out", value=values.out)
  source = leaderboard.BoardMethod(
    name=values.name,
    authors=values.authors,
    url=values.url,
    code=values.code,
    venue=values.venue,
    venue_date=values.venue_date,
  )
  entry = leaderboard.read(
    folders,
    data_set=values.data_set,
    public_data=values.public_data,
    model=values.model,
    series=values.series,
    metric=values.metric,
  )
  content = leaderboard.text(entry, source)
  entries = []
  if values.board is not None:
    path = pathlib.Path(values.board) / entry.file
    content, entries = leaderboard.extended(path, content)
  for claim in entry.claims:
    epsilon = accounting.upper(claim.epsilon)
    line = f"epsilon {epsilon}: {claim.accuracy} ({claim.model})"
    if values.board is not None:
      matches = leaderboard.better(claim, entries)
      line += f"; as good on the board: {'; '.join(matches) or 'nothing'}"
    print(line)
  files.replace_file(out, content.encode())
  print(f"wrote {out}, for {entry.file}")


if __name__ == "__main__":
  app.run(main, words=True)
