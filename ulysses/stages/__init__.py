"""The stages: one file for each training algorithm, and their shared parts in base.py and referenced.py."""
