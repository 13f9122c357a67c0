"""How much memory and time a run takes, and what it therefore keeps, recomputes, or moves to the host."""
