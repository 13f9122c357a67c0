"""Keep the terminal for the run's own lines and its progress bar: libraries' notes and warnings stay away.

Imports nothing heavy, because some libraries speak while they are imported.
"""

import logging
import os
import warnings

# Libraries warn about themselves (deprecations, untested combinations, fallbacks), not about what the user set.
VARIABLES = {
    "PYTHONWARNINGS": "ignore",  # for processes that this one starts
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers warns when it is used before a fork
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def quiet() -> None:
    """Silence what libraries say below the level of an error; call it before they are imported.

    What the user asked for through PYTHONWARNINGS, `python -W` or one of the variables stays as it is.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if os.environ["PYTHONWARNINGS"] == "ignore":
        warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # whatever level a library sets when it is imported


def wants_debug(arguments: list[str]) -> bool:
    """Return whether `--debug` or ULYSSES_DEBUG asks for everything, before the command line is parsed."""
    return "--debug" in arguments or os.environ.get("ULYSSES_DEBUG", "0") not in ("", "0")
