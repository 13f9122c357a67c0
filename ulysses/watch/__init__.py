"""How a run ends: it notices processes that hang or are gone, and tells why in one sentence."""
