"""Tokenised data in memory-mapped files, and the steps that a run reads from them."""
