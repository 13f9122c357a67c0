"""Command line of the export: `python -m ulysses.export RUN/checkpoints/step-N OUT`, or `--merge ADAPTER OUT`.

Needs no GPU, no launcher and no process group.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ulysses.imports import explained_imports

with explained_imports():
    import ulysses.run  # noqa: F401 - first: it refuses foreign packages named models or losses
    from models.folders import ADAPTER_CONFIG, CONFIG
    from ulysses.config.section import absolute, existing
    from ulysses.run.export_model import export_checkpoint, merge_adapter


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint, or merge an adapter; return 2, after one sentence, where that is impossible."""
    parser = argparse.ArgumentParser(
        "python -m ulysses.export", description="Export a checkpoint in Hugging Face format."
    )
    parser.add_argument("source", help="RUN/checkpoints/step-N, or an adapter's folder")
    parser.add_argument("out", help="folder to write; an earlier export is replaced")
    parser.add_argument(
        "--merge", action="store_true", help="add the LoRA adapter to its base's weights"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="",
        help="precision of the weights; by default the one that they were trained in",
    )
    given = parser.parse_args(arguments)
    source, out = (Path(absolute(place)) for place in (given.source, given.out))
    merge = given.merge
    try:
        is_adapter = (existing(source) / ADAPTER_CONFIG).exists()
        if merge and not is_adapter and (source / CONFIG).exists():
            raise ValueError(
                f"{source.absolute()} is a model without adapters; nothing is to be merged"
            )
        if merge and is_adapter:
            note = merge_adapter(source, out, given.dtype)
        else:
            note = export_checkpoint(source, out, merge=merge, dtype=given.dtype)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if note:
        print(f"warning: {note}", file=sys.stderr)
    print(f"exported {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
