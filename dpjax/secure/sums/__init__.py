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

All have a method `sum(vectors, drops)` (`interface.SumProtocol`), modulo 2^32 or 2^64. `CkksSum`
adds floats. `Simulated` has SecAgg's total and cost without its secrecy.
"""

import dataclasses
from typing import Any

from dpjax import validate
from dpjax.secure.sums.additive_shares import AdditiveServers as AdditiveServers
from dpjax.secure.sums.additive_shares import AdditiveSharing as AdditiveSharing
from dpjax.secure.sums.committee import Committee as Committee
from dpjax.secure.sums.homomorphic_sums import BfvSum as BfvSum
from dpjax.secure.sums.homomorphic_sums import CkksSum as CkksSum
from dpjax.secure.sums.interface import NO_DROPS as NO_DROPS
from dpjax.secure.sums.interface import Cost as Cost
from dpjax.secure.sums.interface import Drops as Drops
from dpjax.secure.sums.interface import Summed as Summed
from dpjax.secure.sums.interface import SumProtocol as SumProtocol
from dpjax.secure.sums.plain import PlainSum as PlainSum
from dpjax.secure.sums.secagg import SecAgg as SecAgg
from dpjax.secure.sums.secagg import SecAggPlus as SecAggPlus
from dpjax.secure.sums.simulated import Simulated as Simulated
from dpjax.secure.sums.vectors import bits_needed as bits_needed
from dpjax.validate import UserError

PROTOCOLS = {
  "plain": PlainSum,
  "additive_sharing": AdditiveSharing,
  "additive_servers": AdditiveServers,
  "committee": Committee,
  "secagg": SecAgg,
  "secagg_plus": SecAggPlus,
  "bfv": BfvSum,
}


def by_name(name: str, **settings: Any) -> SumProtocol:
  """Returns the protocol with this name in `PROTOCOLS`.

  Args:
    settings: arguments of the protocol's class, such as `bits`, `min_survivors` and `largest`.

  Raises:
    UserError: an unknown name or setting.

  >>> by_name("secagg", bits=64, min_survivors=3).bits
  64
  """
  validate.one_of(PROTOCOLS, protocol=name)
  known = [field.name for field in dataclasses.fields(PROTOCOLS[name])]
  for setting, value in settings.items():
    if setting not in known:
      raise UserError(
        f"is no setting of {name}: {', '.join(known)}", field=setting, value=value
      )
  return PROTOCOLS[name](**settings)
