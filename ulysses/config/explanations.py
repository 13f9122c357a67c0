"""What is wrong with a configuration, in sentences; imported when something is."""

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ulysses.config.foreign_names import explain_unknown
from ulysses.config.section import flat


def sentences(error: ValidationError, keys: dict[str, FieldInfo]) -> list[str]:
    """Put each of pydantic's errors into one sentence, unknown keys before all others."""
    unknown: list[str] = []
    # what all types of a setting refuse is one error
    wrong: dict[str, str] = {}
    for problem in error.errors():
        message, given = problem["msg"], repr(problem["input"])
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            names = flat({key: problem["input"]})
            unknown += [explain_unknown(name, list(keys)) for name in names]
            continue
        if problem["type"] == "missing":  # it, or an entry of a list
            given = "missing" if key in keys else f"{given}, too short"
        while key not in keys and "." in key:
            # without the position in a list, or the member of a union
            key = key.rpartition(".")[0]
        start = f"{wrong[key]}, or " if key in wrong else f"{key} is {given}: "
        wrong[key] = start + message[0].lower() + message[1:]
    about = {key: info.description.rstrip(".").replace("\n", " ") for key, info in keys.items()}
    hints = (f"{text} ({about.get(key, 'a table of settings')})" for key, text in wrong.items())
    return [*unknown, *hints]
