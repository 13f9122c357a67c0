"""The kernels of attention on the documents that a rank holds after the exchange, and the choice among them."""
