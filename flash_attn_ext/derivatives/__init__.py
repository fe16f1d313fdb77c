"""Derivatives beyond the backward pass: forward mode, second derivatives, and the batching rule of ``torch.vmap``.

Two passes compute all of them, tile by tile from the saved LSE, in memory that grows linearly with the lengths
(forward_tangents.py, backward_tangents.py). Let F(x) = (out, lse), J its Jacobian, and B(x, g) = J(x)^T g the backward
pass. Then:

- forward mode is J(x) dx, the forward tangents;
- the double backward of B, given cotangents a of the gradients, is J(x) a for g, and for x the derivative of B(., g)
  along a, which is symmetric: the backward tangents;
- forward mode of B, and the backward pass of forward mode, are these two, and B itself where g varies.
"""
