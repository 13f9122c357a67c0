"""What is checked before a run begins, and in which order: preflight.py calls everything else here."""
