"""Train a model from any folder: `torchrun ... -m ulysses.train --config dpo.toml`, or `ulysses train`.

The arguments are those of train.py at the top of the repository, which only calls `start`.
"""

import os
import sys
from time import time
from typing import NoReturn

from ulysses.environment import rank, wants_debug
from ulysses.imports import announce_imports, explained_imports, interruptible


def main(arguments: list[str]) -> int:
    """Train, or inspect or plan a run, as the arguments ask; return the exit code after printing any error."""
    debug = wants_debug(arguments)
    with explained_imports():
        from ulysses.config.command_line import help_text, parse_command_line
        from ulysses.config.section import ConfigError
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    announce_imports()
    with explained_imports():
        from psutil import Process

        from ulysses.run.quiet import quiet

        if not debug:
            quiet()  # before the imports below: libraries speak while they are imported
        from ulysses.run.training_run import TrainingRun
        from ulysses.watch.failure import report_config_error, report_failure

    try:
        config, options = parse_command_line(arguments)
        is_first = rank() == 0
        if (options.dry_run or options.inspect) and not is_first:
            return 0
        if is_first and options.adjust_lr == 1 and "adjust_lr" in options.model_fields_set:
            print("--adjust-lr 1 changes nothing; give another factor, such as --adjust-lr 0.5")
        if options.dry_run or options.inspect:
            with explained_imports():
                from ulysses.run.dry_run import dry_run, inspect
            if options.dry_run:
                return dry_run(config, options)
            return inspect(config, options.inspect)
        imports = time() - Process().create_time()
        with TrainingRun(
            config, debug=debug, verify_weights=options.verify_weights, imports=imports
        ) as run:
            run.train()
        return 0
    except ConfigError as error:
        report_config_error(error, debug=debug)
        return 2
    except (
        Exception,
        SystemExit,
    ) as error:  # code of the user's, such as a reward, may end the process
        report_failure(error, debug=debug)
        return 1


def start(arguments: list[str]) -> NoReturn:
    """Run `main` and end the process with its exit code."""
    sys.stdout.reconfigure(line_buffering=True)  # a log file has each line at once
    with interruptible():
        code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown can abort while communication threads still run


if __name__ == "__main__":
    start(sys.argv[1:])
