"""What is counted: the ledger, change rates, and torch's own collectives."""
