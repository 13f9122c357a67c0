"""What --help prints."""

from ulysses.config.command_line import everything, forms


def help_text() -> str:
    """Return what --help prints: every option and setting with its forms, its explanation and its default."""
    text = """Train a language model on long sequences: ulysses train --config FILE.toml [--key value ...]

On several GPUs: torchrun --nproc_per_node 8 -m ulysses.train --config FILE.toml [--key value ...]

Options, and settings, which are also the keys of the TOML file:"""
    for key, info in everything().items():
        known = not info.is_required() and info.default is not None
        default = f" (default {info.default!r})" if known else ""
        shown = key if "." in key else key.replace("_", "-")
        text += f"\n  --{shown} {'|'.join(forms(info.annotation))}\n        {info.description}{default}"
    return text
