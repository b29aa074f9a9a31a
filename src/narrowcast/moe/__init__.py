"""Dispatch and combine of tokens, and the computation of their experts."""
