"""Executions of a cohort: one client after another, many at once, or over devices.

Four executions run the same `ClientAlgorithm`, with one result (to rounding). `process_clients`
divides a cohort among processes, each of which uses one of these executions.

| execution           | what it is                                                 | good for   |
| ------------------- | ---------------------------------------------------------- | ---------- |
| `loop_clients`      | a Python loop; an error says which client it came from     | CPU        |
| `vmap_clients`      | blocks of clients, padded to one shape, in one program     | 1 device   |
| `shard_map_clients` | the same on each of several devices, then `psum`           | several    |
| `pmap_clients`      | the same by `pmap`, which JAX only maintains               | several    |

A single device holds the whole data set and takes batches from it. Each of several devices gets the
rows of its own clients with each block. A block is padded and sent while the one before it runs.

Messages are summed as they are made. Memory holds two blocks, with one message per client IN
A BLOCK, whatever the size of the cohort. Only an aggregator that needs all messages at once (such
as a median) gets them stacked. If one client holds much more than the others, blocks are cut so
that their padded bytes stay within a budget. The server's noise is never added here: the aggregator
adds it once, to the sum, from its one key.

A client gets its own examples and none of the others'. Where batches hold row numbers of one
shared data set, the execution takes the rows (`context.step`), and padding repeats the client's
own. So a client's result is a function of its own data, whatever code the client runs.

Every client of a round has its own key, folded from the round's key by the client's number. One
program holds all keys: this is a simulation, and noise that a client adds hides nothing from
whoever runs it. Clients of `flower` draw their keys in programs of their own.
"""
