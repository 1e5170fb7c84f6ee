"""The sums that a config names. A row of `PROTOCOLS` adds one."""

import dataclasses
from typing import Any

from dpjax import validate
from dpjax.secure.sums.additive_shares import AdditiveServers, AdditiveSharing
from dpjax.secure.sums.committee import Committee
from dpjax.secure.sums.homomorphic_sums import BfvSum
from dpjax.secure.sums.interface import SumProtocol
from dpjax.secure.sums.plain import PlainSum
from dpjax.secure.sums.secagg import SecAgg, SecAggPlus
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
