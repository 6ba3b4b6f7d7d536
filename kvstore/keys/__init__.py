"""Whose a store's blocks are: tenants' secrets that the nodes of a pool share, their epochs, and which node this is."""
