"""Every setting of a run as plain pydantic tables, and the command line; everything else may import it."""
