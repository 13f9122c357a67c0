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
    from models.hf_format import ADAPTER_CONFIG, CONFIG
    from ulysses.config.section import existing
    from ulysses.run.export_model import export_checkpoint, merge_adapter


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint, or merge an adapter; return 2, after one sentence, where that is impossible."""
    parser = argparse.ArgumentParser(
        "python -m ulysses.export", description="Export a checkpoint in Hugging Face format."
    )
    parser.add_argument(
        "source", type=Path, help="RUN/checkpoints/step-N, or an adapter's folder"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--merge", action="store_true", help="add the LoRA adapter to its base's weights"
    )
    given = parser.parse_args(arguments)
    source, out, merge = given.source, given.out, given.merge
    try:
        if any((out / name).exists() for name in (CONFIG, ADAPTER_CONFIG)):
            raise ValueError(
                f"{out.absolute()} already holds a model; give a folder that does not exist yet"
            )
        is_adapter = (existing(source) / ADAPTER_CONFIG).exists()
        if merge and not is_adapter and (source / CONFIG).exists():
            raise ValueError(
                f"{source.absolute()} is a model without adapters; nothing is to be merged"
            )
        if merge and is_adapter:
            merge_adapter(source, out)
        else:
            export_checkpoint(source, out, merge=merge)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"exported {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
