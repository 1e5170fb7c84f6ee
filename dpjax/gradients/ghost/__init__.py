"""Engine of the fast routes: clipped sums from a loss's jaxpr, for any JAX loss.

It computes per-example norms without per-example gradients where a layer allows it. The modules,
in the order of the computation:

- `jaxpr_sites` finds the places where parameters meet data, the layer uses of a loss;
- `chosen_products` finds layer uses whose matrix is chosen by an index;
- `tapped` evaluates the loss, records the layers' inputs and the cotangents of their results, and
  takes parameters from the leaves to a layer;
- `units` groups leaves with their layer uses; `unit_rules` has one class for each way to take the
  norm and the clipped sum of such a unit, `row_forms` one for each kind of layer use;
- `standardized` is the rule of one layer alone, `dpjax.standard_kernels`;
- `cost_model` estimates the time of each way to do so, and `precision` bounds rounding in sums;
- `lengths` bounds what norms lose to underflow;
- `route` has `clipped_sum`, which joins all of these, and `explain` prints the choices.
"""
