"""What the names of a model's tensors tell, in its files as in memory. Imports no torch."""


def is_embedding(tensor_name: str) -> bool:
    """Whether a tensor has a row for each token. A fingerprint covers each row: training may change those of a few new
    tokens alone, which no sample meets."""
    return any(part in tensor_name.lower() for part in ("embed", "wte"))
