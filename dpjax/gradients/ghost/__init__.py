"""Engine of the fast routes: clipped sums from a loss's jaxpr, for any JAX loss.

It computes per-example norms without per-example gradients where a layer allows it. In order:

- `jaxpr_sites`: where parameters meet data, the layer uses of a loss;
- `tapped`: the loss evaluated with the inputs of those layers, and their cotangents, taken out;
- `units`, `unit_rules`, `row_forms`: what one layer contributes to norms and to the clipped sum;
- `cost_model`: which of several ways is the cheapest for a layer, `lengths`: norms that underflow;
- `param_flow`: parameters on their way to a layer;
- `route`: `clipped_sum`, which joins them; `explain`: the choice as a table to print.
"""
