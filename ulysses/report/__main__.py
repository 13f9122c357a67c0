"""python -m ulysses.report RUN [RUN ...] writes report.html and report.png."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

from ulysses.report.page import html_page
from ulysses.report.panels import build_report
from ulysses.report.picture import write_picture
from ulysses.report.runs import read_runs


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m ulysses.report",
        description="Plot what runs have logged, several laid over each other.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (run.output)")
    parser.add_argument(
        "--output",
        type=Path,
        help="where both files go (default: the run's folder; for several runs, here)",
    )
    arguments = parser.parse_args()
    try:
        report = build_report(read_runs(arguments.runs))
        output = arguments.output or (arguments.runs[0] if len(report.runs) == 1 else Path())
        output.mkdir(parents=True, exist_ok=True)
        (output / "report.html").write_text(html_page(report), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output / 'report.html'}")
    try:
        logging.getLogger("matplotlib").setLevel(
            logging.ERROR
        )  # names in scripts that its font lacks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_picture(report, output / "report.png")
    except ImportError as error:
        print(
            f"no picture: {error.name} is not installed; pip install matplotlib writes {output / 'report.png'} too"
        )
        return 0
    print(f"wrote {output / 'report.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
