"""Counts of messages and bytes are those of the messages that clients write."""

import pytest

from benchmarks import sum_messages
from dpjax.secure import sums
from dpjax.secure.sums import committee
from dpjax.secure.sums.terms import KEY_BYTES
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")


def test_the_counts_are_those_of_real_letters():
  terms = parties.terms(6, 4, length=50)
  played = parties.play(terms, parties.vectors(6, 50))
  entry = sum_messages.secagg(sums.SecAgg(min_survivors=4), 6, 50)
  sent = [message for (kind, who), message in played.messages.items() if who == 0]
  heard = [message for (kind, who), message in played.told.items() if who == 0]
  assert entry.messages == len(sent) == 4
  assert entry.sent_bytes == sum(map(len, sent))
  assert entry.received_bytes == sum(map(len, heard))
  assert KEY_BYTES == 96

  protocol = sums.Committee(num_members=4, colluding=1, packed=2)
  client, member = sum_messages.of_committee(protocol, 6, 50)
  vectors = parties.vectors(6, 50)
  cost = protocol.sum(vectors).cost
  assert client.messages == 1 and member.messages == 3
  assert cost.client_bytes == member.sent_bytes + member.received_bytes
  assert cost.server_bytes == 4 * cost.client_bytes + 2 * (
    client.sent_bytes + client.received_bytes
  )


def test_the_cheapest_committee_is_safe_for_the_clients_of_the_table():
  protocol = sum_messages.cheapest(100, 1000)
  least = committee.parameters(
    100,
    corrupt=sum_messages.CORRUPT,
    dropout=sum_messages.SILENT,
    packed=protocol.packed,
  )
  assert (protocol.num_members, protocol.colluding) == least
  default = sum_messages.of_committee(sums.Committee(), 100, 1000)[0]
  assert sum_messages.of_committee(protocol, 100, 1000)[0].sent_bytes < default.sent_bytes
