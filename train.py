"""Train a model: `deepspeed train.py --config dpo.toml`, `torchrun ... train.py --config dpo.toml`, or plain python."""

import os
import sys

from ulysses.training.quiet import quiet, wants_debug

if not wants_debug(sys.argv):
    quiet()  # before the imports below: libraries speak while they are imported

from ulysses.training.command_line import parse_command_line
from ulysses.training.dry_run import dry_run, inspect
from ulysses.training.failure import complain, tell
from ulysses.training.run import TrainingRun
from ulysses.training.section import ConfigError


def main() -> int:
    debug = wants_debug(sys.argv)
    try:
        config, options = parse_command_line(sys.argv[1:])
        if (options.dry_run or options.inspect) and os.environ.get("RANK", "0") != "0":
            return 0
        if options.dry_run:
            return dry_run(config, options)
        if options.inspect:
            return inspect(config, options.inspect)
        with TrainingRun(config, debug=debug) as run:
            run.train()
        return 0
    except ConfigError as error:
        complain(error, debug=debug)
        return 2
    except Exception as error:
        tell(error, debug=debug)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown can abort while communication threads still run
