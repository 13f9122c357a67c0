"""Train a model from any folder: `torchrun ... -m ulysses.train --config dpo.toml`, or `ulysses train`.

The arguments are those of train.py at the top of the repository, which only calls `start`.
"""

import gc
import os
import sys
from time import time
from typing import NoReturn

from ulysses.environment import check_launcher, rank, wants_debug
from ulysses.imports import explained_imports, interruptible, quiet

# none of these imports torch, so that a wrong command is told at once
with explained_imports():
    from ulysses.config.command_line import help_text, parse_command_line
    from ulysses.config.section import ConfigError
    from ulysses.watch.failure import report_config_error


def main(arguments: list[str]) -> int:
    """Train, or inspect or plan a run, as the arguments ask; return the exit code after printing any error."""
    debug = wants_debug(arguments)
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        check_launcher()
        config, options = parse_command_line(arguments)
    except RuntimeError as error:  # told by this process, the only one that knows it
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ConfigError as error:
        report_config_error(error, debug=debug)
        return 2
    is_first = rank() == 0
    only_looks = options.dry_run or options.inspect
    if only_looks and not is_first:
        return 0
    if is_first:
        if options.adjust_lr == 1 and "adjust_lr" in options.model_fields_set:
            print("--adjust-lr 1 changes nothing; give another factor, such as --adjust-lr 0.5")
        # at once, because PyTorch may take long to load
        print("loading the libraries ...", file=sys.stderr, flush=True)
    with explained_imports():
        from psutil import Process

        if not debug:
            quiet()  # before the imports below, during which libraries print
        from ulysses.run.training_run import TrainingRun
        from ulysses.watch.watch import report_failure

        if only_looks:
            from ulysses.run.dry_run import dry_run, inspect
    gc.freeze()  # modules stay, so that no later collection need look through them
    imports = time() - Process().create_time()
    try:
        if options.dry_run:
            return dry_run(config, options)
        if options.inspect:
            return inspect(config, options.inspect)
        with TrainingRun(config, debug=debug, imports=imports) as run:
            run.train()
        return 0
    except ConfigError as error:
        report_config_error(error, debug=debug)
        return 2
    # The user's code, such as a reward, may raise anything. The loop notes its step on every error (Trainer.advance):
    # an interrupt without notes is Ctrl-C before the first step, which `interruptible` tells.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not hasattr(error, "__notes__"):
            raise
        if isinstance(error, BrokenPipeError) and only_looks:
            raise
        report_failure(error, debug=debug)
        return 1


def start(arguments: list[str]) -> NoReturn:
    """Run `main` and end the process with its exit code."""
    # the user's own modules, such as PPO's reward function, come after the engine's
    sys.path.append(os.getcwd())
    with interruptible():
        code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown can abort while communication threads still run


if __name__ == "__main__":
    start(sys.argv[1:])
