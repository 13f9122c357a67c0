"""Keep the terminal for the run's own lines and its progress bar: libraries' notes and warnings stay away.

Imports nothing heavy, because some libraries speak while they are imported.
"""

import logging
import warnings

from ulysses import environment

# They warn about themselves (deprecations, untested combinations, fallbacks), not about what the user set.
LOGGERS = (
    "absl", "bitsandbytes", "datasets", "filelock", "fsspec", "huggingface_hub", "matplotlib", "peft", "tensorboard",
    "tensorflow", "torch", "transformers",
)  # fmt: skip
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
    environment.preset(VARIABLES)
    if environment.ignores_warnings():
        warnings.simplefilter("ignore")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its logger's level when it is imported, so only a filter stays.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
