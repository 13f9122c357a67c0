"""Plots of one or several runs: `python -m ulysses.report RUN [RUN ...]`.

runs.py reads metrics.jsonl -> panels.py decides what is shown -> page.py (HTML with SVG) and picture.py (PNG)
"""
