"""Tests of epsilon: canaries, likelihood ratios, and the lower bounds they prove.

The table shows the lower bounds of audits of one Gaussian release, without a bug and with planted
ones. The release claims epsilon 1, 2, 4 or 8 at delta 1e-5, so each cell holds four bounds. A *
marks a refuted claim. tests/auditing plants these bugs, and checks many of the verdicts:

| planted bug      | 20,000 trials, any DP | 20,000 trials, Gaussian | 1,000 canaries, one_run |
| ---------------- | --------------------- | ----------------------- | ----------------------- |
| none             | 0.4 1.0 2.1 4.0       | 0.8 1.7 3.7 7.6         | 0.0 0.1 0.9 1.8         |
| noise halved     | 1.1* 2.2* 4.5* 7.0    | 1.9* 4.1* 8.6* 18*      | 0.2 1.0 2.1 3.7         |
| clipping removed | 6.1* 8.0* 8.1* 8.1*   | 14* 31* 32* 32*         | 3.4* 3.7* 3.7 3.7       |
| clip after sum   | 1.1* 2.2* 4.5* 7.0    | 1.9* 4.1* 8.6* 18*      | 0.0 0.0 0.0 0.0         |

The trials are likelihood ratios of one example (`likelihood_ratio`, `gdp_lower_bound`). The
canaries are `gradient_canaries` in one run. A bound that holds for any mechanism cannot exceed
about log(trials / 5.9), 8.1 here, or 3.7 with these 1,000 canaries in one run. Above that, only the
Gaussian bound can refute a claim. Many canaries in one run cannot show that their sum is clipped
in place of each gradient, since they share this clip.

`canary_clients` are users of a federated run, which `--audit` inserts.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.auditing.canaries import insert_canaries as insert_canaries
  from dpjax.auditing.canary_clients import insert_canary_clients as insert_canary_clients
  from dpjax.auditing.final_model import final_model_scores as final_model_scores
  from dpjax.auditing.gradient_canaries import gradient_canaries as gradient_canaries
  from dpjax.auditing.gradient_canaries import with_canaries as with_canaries
  from dpjax.auditing.lower_bounds import clopper_pearson as clopper_pearson
  from dpjax.auditing.lower_bounds import one_run as one_run
  from dpjax.auditing.lower_bounds import one_run_fdp as one_run_fdp
  from dpjax.auditing.verdict import audit as audit
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
