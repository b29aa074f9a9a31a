"""Tokens on their way: dispatch and combine, expert computation."""
