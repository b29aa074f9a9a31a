"""FSDP2's reduce-scatter with fewer bytes; contributions arrive bitwise identical."""
