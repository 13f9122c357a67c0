"""Attention on the documents that a rank holds after the exchange, one file per kernel of our own."""
