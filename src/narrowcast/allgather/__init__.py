"""Parameters cross the wire: a lossless, narrower FSDP2 all-gather."""
