"""Tokens cross the wire: traces of routing, where experts live, and moving them there."""
