"""Write a report on a finished run for an ethics board: report.md and report.html.

  python -m launch.report runs/quickstart
  python -m launch.report runs/quickstart --attacks=runs/attack_quickstart --workdir=board

The run may be of any kind. The report says in plain words whose data is protected, against whom,
what an attacker can find out at most, what is not covered, and how good the model is. It lists the
audits and attacks that were made on the run: those in folders beside it, and those of --attacks.
report.html needs no other file, and runs no script. Nothing is trained or attacked.
"""

from __future__ import annotations

from absl import flags

from dpjax.experiments.board import report
from dpjax.validate import UserError
from launch import app

flags.DEFINE_string("workdir", None, "Folder of the reports (default: the run's own).")
flags.DEFINE_list("attacks", [], "Folders of launch.attack --run that lie elsewhere.")


def main(*folders: str) -> None:
  """Writes the report on the run in this folder."""
  # pathlib reads "" as the current folder.
  if len(folders) != 1 or not folders[0]:
    raise UserError(
      "must be the folder of one finished run", field="run", value=" ".join(folders)
    )
  values = flags.FLAGS
  if not all(values.attacks):
    raise UserError("must name folders", field="attacks", value=values["attacks"].value)
  paths = report.write(folders[0], attacks=values.attacks, workdir=values.workdir)
  print(f"wrote {', '.join(map(str, paths))}")


if __name__ == "__main__":
  app.run(main, words=True)
