"""Engine of the fast routes: clipped sums from a loss's jaxpr, for any JAX loss.

It computes per-example norms without per-example gradients where a layer allows it. The modules,
in the order of the computation:

- `jaxpr_sites` finds the places where parameters meet data, the layer uses of a loss;
- `chosen_products` finds layer uses whose matrix is chosen by an index;
- `tapped` evaluates the loss, and records the layers' inputs and the cotangents of their results;
- `units`, `unit_rules`, `row_forms`, `standardized` compute what a layer adds to norms and sums;
- `cost_model` estimates the time of each way to do so, and `precision` bounds rounding in sums;
- `lengths` bounds what norms lose to underflow;
- `param_flow` follows parameters from the leaves to a layer;
- `route` has `clipped_sum`, which joins all of these, and `explain` prints the choices.
"""
