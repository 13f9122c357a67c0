"""Decoder models of the families in families.json, on packed batches that are cut over ranks."""
