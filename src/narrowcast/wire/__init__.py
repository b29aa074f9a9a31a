"""Bytes in, bytes out: float planes, entropy coders, payloads, exchanges. No FSDP, no policy."""
