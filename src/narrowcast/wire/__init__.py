"""Bytes in, bytes out: float planes, entropy coders, packets, exchanges. No FSDP, no policy."""
