"""What the names of a model's tensors tell, in its files as in memory. Imports no torch."""

EMBEDDING_NAMES = ("embed", "wte")
"""In the names of token embeddings. Their fingerprint covers each row: training may change those of a few new tokens
alone, which no sample meets."""


def is_embedding(tensor_name: str) -> bool:
    """Whether a tensor's name says that it has a row for each token."""
    return any(part in tensor_name.lower() for part in EMBEDDING_NAMES)
