"""Gradients cross the wire: a reduce-scatter of contributions that arrive to the last bit."""
