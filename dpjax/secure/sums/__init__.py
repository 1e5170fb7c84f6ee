"""Sums of clients' integer vectors. Except for `plain`, the server learns only the sum.

| name               | hides by                       | survives drop-outs | extra    |
| ------------------ | ------------------------------ | ------------------ | -------- |
| `plain`            | nothing: it is the reference   | yes                |          |
| `additive_sharing` | uniform shares among clients   | no                 |          |
| `additive_servers` | uniform shares for k servers   | yes                |          |
| `committee`        | shares for a few clients, in   | yes; enough of the | `secure` |
|                    | one message of each client     | few must stay      |          |
| `secagg`           | pairwise masks, all with all   | yes, down to t     | `secure` |
| `secagg_plus`      | pairwise masks on a graph      | yes                | `secure` |
| `bfv`              | encryption under a key of all  | yes                | `he`     |
|                    | clients                        |                    |          |

All are an `interface.SumProtocol` with `sum(vectors, drops)`, modulo 2^32 or 2^64. `CkksSum` adds
floats. `SecAgg(simulated=True)` has SecAgg's total and cost without its secrecy.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure.sums.additive_shares import AdditiveServers as AdditiveServers
  from dpjax.secure.sums.additive_shares import AdditiveSharing as AdditiveSharing
  from dpjax.secure.sums.committee import Committee as Committee
  from dpjax.secure.sums.homomorphic_sums import BfvSum as BfvSum
  from dpjax.secure.sums.homomorphic_sums import CkksSum as CkksSum
  from dpjax.secure.sums.interface import Drops as Drops
  from dpjax.secure.sums.plain import PlainSum as PlainSum
  from dpjax.secure.sums.protocols import by_name as by_name
  from dpjax.secure.sums.secagg import SecAgg as SecAgg
  from dpjax.secure.sums.secagg import SecAggPlus as SecAggPlus
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
