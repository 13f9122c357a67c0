"""From files of every format to conversations, and from these to tokens with weights."""
